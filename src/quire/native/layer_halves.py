"""What the CPU kernels support of a decoder layer: its attention half, its MLP half, or both.

Knows the parts of a `DecoderLayer` with a bound KV cache, and fills in the C struct `Layer` (kernels/layer.h). A half
that the kernels do not support has no weights there; it runs as modules.

    attention half    input norm, QKV, QK-norm, RoPE, KV write, attention, output projection
    MLP half          second norm, gate and up, activation, down
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn

from quire.attention.cpu import CpuAttention, cache_addresses
from quire.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from quire.layers.norm import Norm, RMSNorm
from quire.ops.cpu.structs import CLayer


def native_layer(layer: nn.Module, pairs: int) -> CLayer:
    """The struct of a layer; `pairs`: of features that its rotary embedding rotates."""
    native = CLayer()
    if type(layer) is not DecoderLayer or layer.residual_scale != 1.0:
        return native
    first, second = layer.norms.attention_in, layer.norms.mlp_in
    if not (norm_fits(first) and norm_fits(second)):
        return native
    native.eps, native.hidden = first.eps, len(first.weight)
    if pairs % 16 == 0 and layer.norms.attention_out is None:
        _fill_attention(layer, first, native)
    if layer.norms.mlp_out is None and second.eps == first.eps:
        _fill_mlp(layer, second, native)
    return native


def has_attention(layer: CLayer) -> bool:
    return layer.qkv.data is not None


def has_mlp(layer: CLayer) -> bool:
    return layer.gate_up.data is not None


def norm_fits(norm: Norm | None) -> TypeGuard[RMSNorm]:
    """Whether the kernels compute this norm."""
    if type(norm) is not RMSNorm or norm.plus_one:
        return False
    return norm.weight.dtype == torch.bfloat16 and len(norm.weight) % 16 == 0


def _fill_attention(layer: DecoderLayer, norm: RMSNorm, native: CLayer) -> None:
    attention = layer.self_attn
    if type(attention) is not SelfAttention or attention.interleaved:
        return
    if attention.full_qk_norm or attention.query_scale is not None:
        return
    attn, q_norm, k_norm = attention.attn, attention.q_norm, attention.k_norm
    spec = attn.spec
    if not isinstance(attn.backend, CpuAttention) or spec.cache is None:
        return
    if spec.v_head_dim != spec.head_dim:
        return
    if not all(each is None or norm_fits(each) for each in (q_norm, k_norm)):
        return
    qkv, o = attention.qkv.ref.kernel_weight(), attention.o_proj.ref.kernel_weight()
    if qkv is None or o is None:
        return
    native.qkv, native.o, native.first_norm = qkv, o, norm.weight.data_ptr()
    if norm_fits(q_norm) and norm_fits(k_norm):
        native.q_norm, native.k_norm = q_norm.weight.data_ptr(), k_norm.weight.data_ptr()
        native.head_eps = q_norm.eps
    *addresses, native.kind = cache_addresses(spec.cache)
    native.keys, native.values, native.key_scales, native.value_scales = addresses
    native.block_size = spec.cache[0].shape[2]
    if spec.sinks is not None:
        sinks_H = spec.sinks.float().contiguous()
        native.references, native.sinks = sinks_H, sinks_H.data_ptr()
    native.heads, native.kv_heads, native.D = attention.heads, attention.kv_heads, attention.size
    native.turns, native.window = attention.rope, spec.window or 0
    native.scale, native.softcap = spec.scale, spec.softcap or 0.0


def _fill_mlp(layer: DecoderLayer, norm: RMSNorm, native: CLayer) -> None:
    mlp = layer.mlp
    if type(mlp) is not GatedMLP:
        return
    gate_up, down = mlp.gate_up.ref.kernel_weight(), mlp.down_proj.ref.kernel_weight()
    if gate_up is None or down is None:
        return
    native.gate_up, native.down, native.second_norm = gate_up, down, norm.weight.data_ptr()
    prepared = mlp.gate_up.ref.prepared
    native.act = 0 if prepared is None else prepared.kernel_act
