"""CacheSpec: what one layer must remember of a request, and what it may forget.

Knows sizes and windows. Does not know tensors, blocks in use, or models. Layers name their spec
(`Attention.cache_spec()`); `layout.py` turns the specs of a model into groups and blocks into bytes.

    full attention      every token, for ever
    sliding window      the last `window` tokens; older blocks are given back
    recurrent state     one fixed-size state a request, whatever its length (designed, not yet built:
                        see docs/design/recurrent-state.md)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Element:
    """How the numbers of a key or a value are kept."""

    itemsize: int  # bytes of one
    beside: int = 0  # bytes beside each key and each value: its scale


ELEMENTS: dict[str, Element] = {
    "float32": Element(4),
    "float16": Element(2),
    "bfloat16": Element(2),
    "int8": Element(1, 4),
    "fp8_e4m3": Element(1, 4),
    "fp8_e5m2": Element(1, 4),
}
"""By name, as `Resolved.kv_dtype` has it. What 8 bits mean: attention/kv_quantization.py."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Full attention: keys and values of every token."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str  # one of ELEMENTS

    @property
    def bytes_per_token(self) -> int:
        """Of one layer."""
        element = ELEMENTS[self.dtype]
        numbers = (self.head_dim + self.v_head_dim) * element.itemsize
        return self.num_kv_heads * (numbers + 2 * element.beside)

    def first_needed(self, computed: int) -> int:
        """The oldest token position that the token at position `computed` still looks at."""
        return 0


@dataclass(frozen=True, slots=True)
class WindowSpec(CacheSpec):
    """A token at position p sees positions p - window + 1 .. p (itself counted)."""

    window: int = 0

    def first_needed(self, computed: int) -> int:
        return max(0, computed - self.window + 1)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. All groups take blocks of equal bytes from one pool.

    A block of this group holds `block_size` tokens of each of `layers`; layer number i of the group
    lives in storage tensor i (`layout.py`), so that a block id means the same memory in any group.
    """

    spec: CacheSpec
    layers: tuple[int, ...]  # layer indices of the model
