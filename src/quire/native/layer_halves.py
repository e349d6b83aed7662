"""What the CPU kernels support of a decoder layer: its attention half, its MLP half, or both.

Knows the parts of a `PreNormLayer` with a bound KV cache, and fills in the C struct `Layer` (kernels/layer.h). A half
that the kernels do not support has no weights there; it runs as modules.

    attention half    input norm, QKV, QK-norm, RoPE, KV write, attention, output projection
    MLP half          second norm, gate and up, activation, down
"""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.cpu import CpuAttention, cache_addresses
from quire.layers.decoder_layer import GatedMLP, PreNormLayer, SelfAttention
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.weights import PANEL
from quire.ops.cpu.structs import CLayer, CWeight


def native_layer(layer: nn.Module, pairs: int) -> CLayer:
    """The struct of a layer; `pairs`: of features that its rotary embedding rotates."""
    native = CLayer()
    if type(layer) is PreNormLayer:
        native.eps = layer.input_layernorm.eps
        native.hidden = len(layer.input_layernorm.weight)
        if pairs % 16 == 0:
            _fill_attention(layer, native)
        _fill_mlp(layer, native)
    return native


def has_attention(layer: CLayer) -> bool:
    return layer.qkv.data is not None


def has_mlp(layer: CLayer) -> bool:
    return layer.gate_up.data is not None


def norm_fits(norm: RMSNorm) -> bool:
    """Whether the kernels compute this norm."""
    weight = norm.weight
    return not norm.plus_one and weight.dtype == torch.bfloat16 and len(weight) % 16 == 0


def _fill_attention(layer: PreNormLayer, native: CLayer) -> None:
    attention = layer.self_attn
    if type(attention) is not SelfAttention or attention.interleaved:
        return
    attn, q_norm, k_norm = attention.attn, attention.q_norm, attention.k_norm
    spec, norms = attn.spec, [layer.input_layernorm, q_norm, k_norm]
    if not isinstance(attn.backend, CpuAttention) or spec.cache is None:
        return
    if spec.v_head_dim != spec.head_dim or not all(
        norm is None or norm_fits(norm) for norm in norms
    ):
        return
    qkv, o = _weight(attention.qkv), _weight(attention.o_proj)
    if qkv is None or o is None:
        return
    native.qkv, native.o, native.first_norm = qkv, o, layer.input_layernorm.weight.data_ptr()
    if q_norm is not None and k_norm is not None:
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


def _fill_mlp(layer: PreNormLayer, native: CLayer) -> None:
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    if type(mlp) is not GatedMLP:
        return
    gate_up, down = _weight(mlp.gate_up), _weight(mlp.down_proj)
    if (
        gate_up is None
        or down is None
        or not norm_fits(norm)
        or norm.eps != layer.input_layernorm.eps
    ):
        return
    native.gate_up, native.down, native.second_norm = gate_up, down, norm.weight.data_ptr()
    prepared = mlp.gate_up.ref.prepared
    native.act = 0 if prepared is None else prepared.kernel_act


def _weight(linear: Linear) -> CWeight | None:
    """The C description of the weight; None if the kernels do not multiply it, or its last panel is not full."""
    prepared, bias_O = linear.ref.prepared, linear.ref.bias
    if prepared is None or prepared.kernels is None or prepared.outs % PANEL:
        return None
    bias = None if bias_O is None else bias_O.data_ptr()
    return CWeight(**prepared.kernel_args(), bias=bias, outs=prepared.outs, ins=prepared.ins)
