"""What the CPU kernels support of a decoder layer: its attention, its MLP, or both.

Knows the parts that a layer with a bound KV cache declares (`layers/native_parts.py`), and fills in the C struct `Layer`
(kernels/layer.h). A sublayer that the kernels do not support has no weights there; it runs as modules.

    attention    norm, QKV, QK-norm, scale of queries, RoPE, KV write, attention, gate, output projection, norm, scale; or
                 norm, a gated delta net (`fused_delta_net.py`) or a `Mamba2Mixer` (`fused_mamba2_mixer.py`), norm, scale
    MLP          norm, gate and up, activation, down, norm, scale; or norm, a mixture (`fused_moe.py`), norm, scale
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from quire.attention.cpu import CpuAttention, cache_addresses
from quire.layers.attention import Attention
from quire.layers.decoder_layer import GatedMLP
from quire.layers.native_parts import AttentionParts, layer_parts, native_parts
from quire.layers.norm import LayerNorm, Norm, RMSNorm
from quire.native.fused_delta_net import native_delta_net
from quire.native.fused_mamba2_mixer import native_mamba2_mixer
from quire.native.fused_moe import native_mixture
from quire.ops.cpu.structs import LAYER_NORM, RMS, RMS_PLUS_ONE, CLayer, CNorm


def native_layer(layer: nn.Module, pairs: int) -> CLayer:
    """The struct of a layer; `pairs`: of features that its rotary embedding rotates."""
    native = CLayer(residual_scale=1.0)
    if (parts := layer_parts(layer)) is None:
        return native
    native.residual_scale, native.parallel = parts.residual_scale, parts.parallel
    native.hidden = next((len(norm.weight) for norm in parts.norms if norm is not None), 0)
    norms = [native_norm(norm) for norm in parts.norms]
    if not native.hidden:
        return native
    if parts.attention is not None and None not in norms[:2]:
        native.attention_in, native.attention_out = norms[:2]
        fill_attention(parts.attention, pairs, native)
    if parts.mlp is not None and None not in norms[2:]:
        native.mlp_in, native.mlp_out = norms[2:]
        _fill_mlp(parts.mlp, native)
    return native


def has_attention(layer: CLayer) -> bool:
    return any(part is not None for part in (layer.qkv.data, layer.delta_net, layer.mamba2_mixer))


def has_mlp(layer: CLayer) -> bool:
    return layer.gate_up.data is not None or layer.mixture is not None


def native_norm(norm: Norm | None, takes_bias: bool = False) -> CNorm | None:
    """The struct of a norm, or of no norm; None: the kernels do not compute it."""
    if norm is None:
        return CNorm()
    if type(norm) is RMSNorm:
        kind = RMS_PLUS_ONE if norm.plus_one else RMS
    elif type(norm) is LayerNorm and (takes_bias or norm.bias is None):
        kind = LAYER_NORM
    else:
        return None
    weight = norm.weight
    if weight.dim() != 1 or weight.dtype != torch.bfloat16 or len(weight) % 16:
        return None
    bias = norm._parameters.get("bias")
    return CNorm(weight.data_ptr(), kind, norm.eps, None if bias is None else bias.data_ptr())


def fill_attention(module: nn.Module, pairs: int, native: CLayer) -> None:
    if not native.parallel and (net := native_delta_net(module)) is not None:
        native.recurrent_references, native.delta_net = net, ctypes.addressof(net)
    if not native.parallel and (mixer := native_mamba2_mixer(module)) is not None:
        native.recurrent_references, native.mamba2_mixer = mixer, ctypes.addressof(mixer)
    if not isinstance(parts := native_parts(module), AttentionParts):
        return
    attention = parts.module
    if attention.output_gate and (attention.full_qk_norm or attention.query_scale is not None):
        return  # these would change the gates, too
    if attention.rope and (pairs % 16 or 2 * pairs > attention.size):
        return
    attn = attention.attn
    spec = attn.spec
    if type(attn) is not Attention or not isinstance(attn.backend, CpuAttention):
        return
    if spec.cache is None:
        return
    if spec.v_head_dim != spec.head_dim or not spec.causal:
        return
    if len(attention.sizes) == 2 and spec.cache[0].dtype != torch.bfloat16:
        return  # keys are quantized in place, and values are read there
    q_norm, k_norm = native_norm(attention.q_norm), native_norm(attention.k_norm)
    qkv, o = attention.qkv.ref.kernel_weight(), attention.o_proj.ref.kernel_weight()
    if qkv is None or o is None or q_norm is None or k_norm is None:
        return
    native.qkv, native.o, native.q_norm, native.k_norm = qkv, o, q_norm, k_norm
    native.flat_norms, native.kv_parts = attention.full_qk_norm, len(attention.sizes) - 1
    native.gated = attention.output_gate
    if attention.full_qk_norm and attention.ranks is not None:
        native.flat_ranks, native.kv_copies = attention.ranks.link, attention.kv_copies
    if parts.value_norm_eps is not None and native.kv_parts:
        native.v_norm = CNorm(None, RMS, parts.value_norm_eps)
    *addresses, native.kind = cache_addresses(spec.cache)
    native.keys, native.values, native.key_scales, native.value_scales = addresses
    native.block_size = spec.cache[0].shape[2]
    if spec.sinks is not None:
        sinks_H = spec.sinks.float().contiguous()
        native.references, native.sinks = sinks_H, sinks_H.data_ptr()
    native.heads, native.kv_heads, native.D = attention.heads, attention.kv_heads, attention.size
    native.rope, native.interleaved = attention.rope, attention.interleaved
    native.window, native.scale, native.softcap = spec.window or 0, spec.scale, spec.softcap or 0.0


def _fill_mlp(mlp: nn.Module, native: CLayer) -> None:
    if (mixture := native_mixture(mlp)) is not None:
        native.mixture_references, native.mixture = mixture, ctypes.addressof(mixture)
    if type(mlp) is not GatedMLP:
        return
    gate_up, down = mlp.gate_up.ref.kernel_weight(), mlp.down_proj.ref.kernel_weight()
    prepared = mlp.gate_up.ref.prepared
    if gate_up is None or down is None or prepared is None:
        return
    native.gate_up, native.down, native.act = gate_up, down, prepared.kernel_act
