"""The attention layer of a model: its `AttentionSpec`, and the backend that computes it.

Does not know the layout of the KV cache or how attention is computed: the backend does (`attention/`). The worker
calls `bind` when it has allocated the cache.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size (of values: E).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.attention.base import AttentionBackend, AttentionSpec, QKNormRope
from quire.attention.spans import attend_spans
from quire.forward_context import current_batch
from quire.layers.weight_slots import Layer
from quire.ops.packed_attention import packed_attention


class Attention(Layer):
    """Causal attention of this step's tokens over the contexts of their rows.

    Args:
        scale: factor of q·k before the softmax; None: head_dim ** -0.5.
        v_head_dim: size of a value; None: head_dim.
        window, softcap, sinks, causal, latent: see `AttentionSpec`.
        shared: an earlier layer, whose keys and values this one attends to: it has none of its own.
        layer_index: index of the layer in its model, for messages.
    """

    is_called = False  # see `Layer.is_called`
    backend: AttentionBackend | None = None
    kv_group: int = 0  # index of this layer's block table in the batch

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
        causal: bool = True,
        latent: bool = False,
        shared: Attention | None = None,
        layer_index: int = 0,
    ):
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads"
            )
        if window is not None and not causal:
            raise ValueError("a layer with a window must be causal")
        scale = head_dim**-0.5 if scale is None else scale
        sizes = (num_heads, num_kv_heads, head_dim, v_head_dim or head_dim)
        self.spec = AttentionSpec(
            *sizes, scale, window, softcap, sinks, causal=causal, latent=latent
        )
        self.sinks = sinks  # a weight of this module; loading may replace it until `bind`
        self.layer_index = layer_index
        self.has_cache = shared is None
        self.sharers: list[Attention] = []  # layers that attend to the keys and values of this one
        if shared is not None:
            shared.sharers.append(self)

    def bind(self, backend: AttentionBackend, cache: Any, kv_group: int = 0) -> None:
        """Compute with this backend and cache from now on."""
        if self.spec.latent:
            cache = (cache[0], cache[0][..., : self.spec.v_head_dim])
        self.spec = replace(self.spec, cache=cache, sinks=self.sinks)
        self.backend, self.kv_group = backend, kv_group
        for sharer in self.sharers:
            sharer.bind(backend, cache, kv_group)

    def drop_cache(self) -> None:
        """Forget the cache, so that its memory can be freed; `bind` gives the layer another one."""
        self.spec = replace(self.spec, cache=None)
        for sharer in self.sharers:
            sharer.drop_cache()

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor | None = None, v_TKE: Tensor | None = None
    ) -> Tensor:
        """Write k and v to the cache, if given, then attend; returns o_THE.

        Raises:
            RuntimeError: no forward pass is running, or the worker gave this layer no backend.
        """
        meta = self.step_metadata()
        if k_TKD is not None and v_TKE is not None and current_batch().split_tokens is not None:
            k_TKD, v_TKE = self._of_all_parts(k_TKD, v_TKE)
        backend: Any = self.backend
        o_THE: Tensor = backend.attend(self.spec, q_THD, k_TKD, v_TKE, meta)
        if (batch := current_batch()).spans:
            attend_spans(backend, self.spec, self.kv_group, batch, q_THD, o_THE)
        return o_THE

    def _of_all_parts(self, k_TKD: Tensor, v_TKE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens of a step that is split, in the order of `ForwardBatch.slots`."""
        split, sizes = current_batch().split_tokens, (k_TKD.shape[1:], v_TKE.shape[1:])
        both_TW = (
            k_TKD.flatten(1)
            if self.spec.latent
            else torch.cat((k_TKD.flatten(1), v_TKE.flatten(1)), 1)
        )
        both_TW = split.gather(both_TW)  # type: ignore[union-attr]
        width = sizes[0].numel()
        k_TKD = both_TW[:, :width].unflatten(1, sizes[0])
        if self.spec.latent:
            return k_TKD, k_TKD[..., : self.spec.v_head_dim]
        return k_TKD, both_TW[:, width:].unflatten(1, sizes[1])

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
        if attend is None or current_batch().needs_modules:
            return None
        o_THE: Tensor | None = attend(
            self.spec, q_THD, k_TKD, v_TKE, how, angles, self.step_metadata()
        )
        return o_THE

    def step_metadata(self) -> Any:
        """Step metadata that the layers of the KV group share; the first layer of the step makes it."""
        if self.backend is None:
            raise RuntimeError(f"attention layer {self.layer_index} has no backend yet")
        batch = current_batch()
        meta = batch.meta.get(self.kv_group)
        if meta is None:
            meta = batch.meta[self.kv_group] = self.backend.plan(batch, self.kv_group)
        return meta

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_heads}, kv_heads={spec.num_kv_heads}, head_dim={spec.head_dim}, window={spec.window}"


class PackedAttention(Layer):
    """Attention of each prompt's tokens to all of the prompt, without a cache; see `packed_attention` (ops/packed_attention.py).

    Args:
        scale: factor of q·k before the softmax; None: head_dim ** -0.5.
        window: a token attends to itself, and to window - 1 tokens before it and after it; None: to all.
        runs: the kind of runs of tokens that attend to each other, in place of prompts (`ForwardBatch.run_starts`).
    """

    is_called = False  # see `Layer.is_called`

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        runs: str | None = None,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.runs = runs
        self.scale, self.window = head_dim**-0.5 if scale is None else scale, window

    def bias_HL(self) -> Tensor | None:
        """The bias of scores by head and distance; None: there is none."""
        return None

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """o_THD"""
        starts_B1 = current_batch().starts_of(self.runs)
        return packed_attention(
            q_THD, k_TKD, v_TKD, starts_B1, self.scale, self.window, self.bias_HL()
        )

    def fused_rope(self, *args: Any) -> Tensor | None:
        """None: see `Attention.fused_rope`."""
        return None

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, window={self.window}"
