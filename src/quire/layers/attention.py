"""Attention: what a model says about one attention layer, and what the layer must remember.

Knows heads, sizes, window, softcap and sinks. Does not know where keys and values lie or how the sum is
computed: that is its backend's (`attention/`), given by the worker together with `cache` and `group`.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size (of values: E).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from quire.attention.base import AttentionBackend
from quire.forward_context import current_batch
from quire.kvcache.specs import CacheSpec, WindowSpec


class QKNormRope(NamedTuple):
    """What is still to be done to queries and keys."""

    interleaved: bool  # pairs of neighbours turn
    q_weight_D: Tensor | None = None  # of their RMS norms; None: there are none
    k_weight_D: Tensor | None = None
    eps: float = 0.0
    plus_one: bool = False


class Attention(nn.Module):
    """Causal attention of this step's tokens over their rows' contexts.

    Args:
        scale: factor of q·k before the softmax; None: head_dim ** -0.5.
        v_head_dim: size of a value; None: head_dim.
        window: a token sees itself and the window - 1 tokens before it; None: all before it.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H], a score of each head that takes part in the softmax and has no value.
        layer_index: of the layer in its model, for messages.
    """

    backend: AttentionBackend | None = None
    cache: Any = None  # what the backend's `cache_parts` asked for
    group: int = 0  # which of the batch's block tables is this layer's

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        v_head_dim: int | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: nn.Parameter | None = None,
        layer_index: int = 0,
    ):
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide among {num_kv_heads} KV heads")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.v_head_dim = v_head_dim or head_dim
        self.window, self.softcap, self.sinks = window, softcap, sinks
        self.layer_index = layer_index

    def cache_spec(self, dtype: str) -> CacheSpec:
        """What this layer keeps of a request; dtype: name of the cached elements (kvcache/specs.py)."""
        sizes = (self.num_kv_heads, self.head_dim, self.v_head_dim, dtype)
        return CacheSpec(*sizes) if self.window is None else WindowSpec(*sizes, window=self.window)

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor) -> Tensor:
        """Write k and v to the cache, then attend; returns o_THE.

        Raises:
            RuntimeError: no forward pass is running, or the worker gave this layer no backend.
        """
        meta = self._meta()
        return self.backend.attend(self, q_THD, k_TKD, v_TKE, meta)  # type: ignore[union-attr]

    def fused_rope(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKE: Tensor,
        how: QKNormRope,
        angles: tuple[Tensor, Tensor],
    ) -> Tensor | None:
        """As `forward`, of queries and keys that are neither normed nor turned yet, by backends that do all in one pass.

        None: this one does not, and nothing has happened.
        """
        attend = getattr(self.backend, "attend_unturned", None)
        if attend is None:
            return None
        o_THE: Tensor | None = attend(self, q_THD, k_TKD, v_TKE, how, angles, self._meta())
        return o_THE

    def _meta(self) -> Any:
        """What the layers of the group share in this step: the first of them plans for the others."""
        if self.backend is None:
            raise RuntimeError(f"attention layer {self.layer_index} has no backend yet")
        batch = current_batch()
        meta = batch.meta.get(self.group)
        if meta is None:
            meta = batch.meta[self.group] = self.backend.plan(batch, self.group)
        return meta

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, window={self.window}"
