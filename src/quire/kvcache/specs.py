"""CacheSpec and StateSpec: what one layer keeps for a request, and when it may drop it.

Knows sizes and windows. Does not know tensors, blocks in use, or models. Each layer gives its spec
(`AttentionSpec.cache_spec`, `StateLayer.state_spec`); `layout.py` makes groups and block sizes from the cache specs of a
model.

    full attention      every token, as long as the request runs
    sliding window      the last `window` tokens; older blocks are released
    cross attention     the states that an encoder made of the request's other input, as many as it has, as long as the
                        request runs; they are written when the request enters, and only read afterwards
    recurrent state     one state of fixed size for each request, whatever its length; it is not in blocks
                        (docs/design/recurrent-state.md)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Element:
    """How one number of a key or a value is stored."""

    itemsize: int  # bytes of one number
    beside: int = 0  # additional bytes for each key and each value: its scale


ELEMENTS: dict[str, Element] = {
    "float32": Element(4),
    "float16": Element(2),
    "bfloat16": Element(2),
    "int8": Element(1, 4),
    "fp8_e4m3": Element(1, 4),
    "fp8_e5m2": Element(1, 4),
}
"""By name, as in `Resolved.kv_dtype`. attention/kv_quantization.py defines the 8-bit formats."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Full attention: keys and values of every token."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str  # one of ELEMENTS

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        element = ELEMENTS[self.dtype]
        numbers = (self.head_dim + self.v_head_dim) * element.itemsize
        return self.num_kv_heads * (numbers + 2 * element.beside)

    def first_needed(self, position: int) -> int:
        """The oldest token position that the token at `position` still attends to."""
        return 0


@dataclass(frozen=True, slots=True)
class WindowSpec(CacheSpec):
    """A token at position p attends to positions p - window + 1 .. p (its own included)."""

    window: int = 0

    def first_needed(self, position: int) -> int:
        return max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(CacheSpec):
    """Keys and values of the encoder's states of a request: `Request.num_encoder_tokens`, at most `max_encoder_len`."""

    max_encoder_len: int = 0


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. All groups take blocks of equal size from one pool.

    A block of this group has `block_size` tokens of each of `layers`, which keep the same tokens. The i-th layer of one
    shape is in storage tensor i of that shape (`layout.py`), so that a block id means the same memory in any group.
    """

    spec: CacheSpec
    layers: tuple[int, ...]
    """Layer indices over all models."""
    shapes: tuple[CacheSpec, ...] = ()
    """The spec of each layer; empty: all layers have `spec`."""


STATE_ALIGNMENT = 64
"""Each part of a state starts at a multiple of this number of bytes, so that a kernel can use aligned loads."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent state of one request in one layer: tensors of fixed shapes, for example recurrence and convolution.

    shapes: without the dimension of the rows. dtypes: of each tensor, one of ELEMENTS that is a float format.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor for one request, padded to the alignment."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        sizes = (prod(shape) * ELEMENTS[dtype].itemsize for shape, dtype in pairs)
        return tuple(-(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT for size in sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes for one request in one layer."""
        return sum(self.part_bytes)
