"""Fused decoder layers on the CPU: one kernel call for a layer, or for all layers, where the kernels have every part.

Knows the parts of a `PreNormLayer`. A fused layer gives the same bits as its parts. A layer that the kernels do not
support stays as it is. A fused layer runs its parts one by one until its KV cache is allocated.

Shape suffixes: T tokens, D features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.attention.cpu import CpuAttention, CpuStepMetadata, cache_addresses
from quire.forward_context import current_batch
from quire.layers.attention import Attention
from quire.layers.decoder_layer import GatedMLP, Layers, PreNormLayer, SelfAttention
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import Angles, LayerRotaries
from quire.layers.weights import PANEL
from quire.ops.cpu.bindings import Kernels, best
from quire.ops.cpu.structs import CLayer, CStep, CWeight

_P, _L = ctypes.c_void_p, ctypes.c_int64


def fuse_model(model: object) -> int:
    """Fuse every layer that the kernels support; return how many."""
    kernels = best()
    if kernels is None or not isinstance(model, nn.Module):
        return 0
    found = [
        layer for layer in model.modules() if isinstance(layer, PreNormLayer) and can_fuse(layer)
    ]
    for layer in found:
        layer.fused = FusedLayer(layer, kernels)
    for layers in model.modules():
        if isinstance(layers, Layers):
            alone = [layer.fused for layer in layers if isinstance(layer.fused, FusedLayer)]
            if alone and len(alone) == len(layers):
                layers.fused = FusedDecoder(alone, kernels)
    return len(found)


def unfuse_model(model: object) -> None:
    """Undo `fuse_model`, so that each module is called."""
    if isinstance(model, nn.Module):
        for part in model.modules():
            if isinstance(part, PreNormLayer | Layers):
                part.fused = None


def can_fuse(layer: PreNormLayer) -> bool:
    """Whether the kernels support all parts of the layer."""
    attention, mlp = layer.self_attn, layer.mlp
    if type(layer) is not PreNormLayer or type(attention) is not SelfAttention:
        return False
    if type(mlp) is not GatedMLP or not mlp.gate_up.ref.gated or attention.interleaved:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if not all(_norm_fits(norm) for norm in norms):
        return False
    linears = (attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj)
    attend = attention.attend
    return (
        all(_weight(linear) is not None for linear in linears)
        and attend.spec.v_head_dim == attend.spec.head_dim
    )


def _norm_fits(norm: RMSNorm) -> bool:
    weight = norm.weight
    return not norm.plus_one and weight.dtype == torch.bfloat16 and len(weight) % 16 == 0


def _weight(linear: Linear) -> CWeight | None:
    """The C description of the weight; None if the kernels do not multiply it, or its last panel is not full."""
    prepared, bias_O = linear.ref.prepared, linear.ref.bias
    if prepared is None or prepared.kernels is None or prepared.outs % PANEL:
        return None
    bias = None if bias_O is None else bias_O.data_ptr()
    return CWeight(**prepared.kernel_args(), bias=bias, outs=prepared.outs, ins=prepared.ins)


class FusedLayer:
    """A fused layer. It reads addresses once the cache is allocated: they do not change afterwards."""

    def __init__(self, layer: PreNormLayer, kernels: Kernels):
        self.layer, self.kernels = layer, kernels
        self.told: CLayer | None = None
        self.address = 0
        self.sinks_H: Tensor | None = None

    def ready(self, angles: Angles) -> bool:
        """Whether the kernels do its attention, and its cache is allocated."""
        if angles[0].shape[1] % 16:
            return False
        if self.told is None:
            attention: Any = self.layer.self_attn
            attend = attention.attend
            if not isinstance(attend.backend, CpuAttention) or attend.spec.cache is None:
                return False
            self._tell()
        return True

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """As `PreNormLayer.forward`; overwrites both tensors."""
        first = residual_TD is None
        residual_TD = torch.empty_like(x_TD) if residual_TD is None else residual_TD
        attention: Any = self.layer.self_attn
        step = _step_of(attention.attend, angles)
        self.kernels.layer(self.address, step, x_TD.data_ptr(), residual_TD.data_ptr(), first)
        return x_TD, residual_TD

    def _tell(self) -> None:
        attention: Any = self.layer.self_attn  # of the types that `can_fuse` accepts
        mlp: Any = self.layer.mlp
        attend = attention.attend
        spec = attend.spec
        told, block_size = cache_addresses(spec.cache), spec.cache[0].shape[2]
        if spec.sinks is not None:
            self.sinks_H = spec.sinks.float().contiguous()
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self.told = CLayer(
            _weight(attention.qkv), _weight(attention.o_proj), _weight(mlp.gate_up), _weight(mlp.down_proj),
            self.layer.input_layernorm.weight.data_ptr(),
            self.layer.post_attention_layernorm.weight.data_ptr(),
            None if q_norm is None else q_norm.weight.data_ptr(),
            None if k_norm is None else k_norm.weight.data_ptr(),
            *told[:4],
            None if self.sinks_H is None else self.sinks_H.data_ptr(),
            told[4], attention.qkv.ref.num_in, attention.heads, attention.kv_heads, attention.size,
            attention.rope, block_size, spec.window or 0,
            self.layer.input_layernorm.eps, 0.0 if q_norm is None else q_norm.eps,
            spec.scale, spec.softcap or 0.0,
        )  # fmt: skip
        self.address = ctypes.addressof(self.told)


class FusedDecoder:
    """All layers of a model in one call; each of them is fused."""

    def __init__(self, layers: Sequence[FusedLayer], kernels: Kernels):
        self.layers, self.kernels = layers, kernels
        self.told: ctypes.Array[Any] | None = None
        self.groups: ctypes.Array[Any] | None = None
        self.firsts: list[Attention] = []  # a layer of each group

    def ready(self, angles: Angles, norm: RMSNorm) -> bool:
        """Whether each layer is ready, and the kernels support the norm."""
        if self.told is None:
            if not (_norm_fits(norm) and all(layer.ready(angles) for layer in self.layers)):
                return False
            self._tell()
        return True

    def run(
        self, x_TD: Tensor, positions: Tensor, rotary: LayerRotaries, norm: RMSNorm
    ) -> Tensor | None:
        """As `Layers.forward`; overwrites x. None: layers differ in their rotary embedding, or a layer is not ready."""
        if (shared := rotary.shared) is None or not self.ready(table := shared.table(), norm):
            return None
        if positions.ndim == 1 and current_batch().max_length <= len(table[0]):
            return self._run(x_TD, table, norm, positions)
        return self._run(x_TD, shared(positions), norm, None)

    def _run(
        self, x_TD: Tensor, angles: Angles, norm: RMSNorm, positions_T: Tensor | None
    ) -> Tensor:
        steps = (_P * len(self.firsts))(
            *(_step_of(one, angles, positions_T) for one in self.firsts)
        )
        self.kernels.layers(
            self.told, self.groups, len(self.layers), steps, x_TD.data_ptr(), norm.weight.data_ptr(), norm.eps,
        )  # fmt: skip
        return x_TD

    def _tell(self) -> None:
        count = len(self.layers)
        attends: list[Any] = [layer.layer.self_attn.attend for layer in self.layers]
        groups = sorted({attend.kv_group for attend in attends})
        self.firsts = [next(a for a in attends if a.kv_group == group) for group in groups]
        self.groups = (_L * count)(*(groups.index(attend.kv_group) for attend in attends))
        self.told = (_P * count)(*(layer.address for layer in self.layers))


def _step_of(attend: Attention, angles: Angles, positions_T: Tensor | None = None) -> int:
    """Address of the C struct that layers of a KV group and of equal angles share in this step; the first makes it.

    angles: one per token; with `positions_T`, a table with one per position.
    """
    batch = current_batch()
    plan: CpuStepMetadata | None = batch.meta.get(attend.kv_group)
    if plan is None:
        if attend.backend is None:
            raise RuntimeError("attention has no backend yet")
        plan = batch.meta[attend.kv_group] = attend.backend.plan(batch, attend.kv_group)
    key = angles[0].data_ptr()
    if key not in plan.steps:
        cos_TP, sin_TP = (part.float().contiguous() for part in angles)
        step = CStep(
            cos_TP.data_ptr(), sin_TP.data_ptr(), None if positions_T is None else positions_T.data_ptr(),
            plan.slots_T.data_ptr(), plan.table_BN.data_ptr(),
            plan.starts_B1.data_ptr(), plan.lengths_B.data_ptr(),
            len(plan.slots_T), plan.rows, plan.table_BN.shape[1], cos_TP.shape[1],
        )  # fmt: skip
        tensors = (angles, cos_TP, sin_TP, positions_T)  # keep them alive with the step
        plan.steps[key] = (ctypes.addressof(step), step, *tensors)
    return int(plan.steps[key][0])
