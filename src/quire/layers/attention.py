"""One attention layer as a model describes it, and what the layer keeps in the KV cache.

Knows heads, sizes, window, softcap and sinks. Does not know the layout of the KV cache or how attention is
computed: its backend does (`attention/`). The worker sets `backend`, `cache` and `group`.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size (of values: E).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from quire.attention.base import AttentionBackend
from quire.forward_context import current_batch
from quire.kvcache.specs import CacheSpec, WindowSpec


class QKNormRope(NamedTuple):
    """The norm and rotation that the backend applies to queries and keys."""

    interleaved: bool  # rotates pairs of adjacent features
    q_weight_D: Tensor | None = None  # weights of the RMS norms; None: no norms
    k_weight_D: Tensor | None = None
    eps: float = 0.0
    plus_one: bool = False


class Attention(nn.Module):
    """Causal attention of this step's tokens over the contexts of their rows.

    Args:
        scale: factor of q·k before the softmax; None: head_dim ** -0.5.
        v_head_dim: size of a value; None: head_dim.
        window: a token attends to itself and the window - 1 tokens before it; None: to all before it.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H], one score per head that enters the softmax without a value.
        layer_index: index of the layer in its model, for messages.
    """

    backend: AttentionBackend | None = None
    cache: Any = None  # the tensors that the backend's `cache_parts` describes
    group: int = 0  # KV group: index of this layer's block table in the batch

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
        """The KV cache of this layer; dtype: name of the element type (kvcache/specs.py)."""
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
        """As `forward`, for queries and keys before norm and rotation, where the backend does all in one pass.

        None: the backend cannot; nothing was written.
        """
        attend = getattr(self.backend, "attend_fused_rope", None)
        if attend is None:
            return None
        o_THE: Tensor | None = attend(self, q_THD, k_TKD, v_TKE, how, angles, self._meta())
        return o_THE

    def _meta(self) -> Any:
        """Step metadata that the layers of the KV group share; the first layer of the step makes it."""
        if self.backend is None:
            raise RuntimeError(f"attention layer {self.layer_index} has no backend yet")
        batch = current_batch()
        meta = batch.meta.get(self.group)
        if meta is None:
            meta = batch.meta[self.group] = self.backend.plan(batch, self.group)
        return meta

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, window={self.window}"
