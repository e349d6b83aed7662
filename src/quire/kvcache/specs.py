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
class CacheSpec:
    """Full attention: keys and values of every token."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int  # bytes of one element

    @property
    def bytes_per_token(self) -> int:
        """Of one layer."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.itemsize

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
