"""Fused encoders on the CPU: all layers and the last norm in one kernel call, which gives the same bits as its modules.

Knows which layers the kernels support; if one is unsupported, all run as modules. Does not know embeddings.

Shape suffixes: T tokens, D features, P pairs of features.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.forward_context import current_adapters, current_batch
from quire.layers.attention import PackedAttention
from quire.layers.decoder_layer import GatedMLP, SelfAttention
from quire.layers.encoder import EncoderLayer, EncoderStack, UngatedMLP
from quire.layers.norm import Norm
from quire.native.fused_layers import native_norm
from quire.ops.cpu.bindings import Kernels
from quire.ops.cpu.norm_rope_act import scaled_bias
from quire.ops.cpu.structs import CEncoderLayer, CEncoderStep, CNorm

LEAST_PAIRS = 16
"""Pairs of features that the kernels rotate at once."""

_P, _norm = ctypes.c_void_p, partial(native_norm, takes_bias=True)


def fuse_encoder(encoder: EncoderStack, kernels: Kernels) -> None:
    """Let the kernels compute the layers, if they support all of them."""
    layers: list[Any] = list(encoder.layers)
    if not layers or any(type(layer) is not EncoderLayer for layer in layers):
        return
    before = layers[0].pre_norm
    norms_after_parts = [(layer.attention_norm, layer.mlp_norm) for layer in layers]
    if before:  # a half ends with the norm of the next
        firsts = [layer.attention_norm for layer in layers[1:]]
        norms = zip(layers, [*firsts, encoder.final_norm], strict=True)
        norms_after_parts = [(layer.mlp_norm, norm) for layer, norm in norms]
    elif encoder.final_norm is not None:
        return
    kinds = [-1] * len(layers) if encoder.rotaries is None else encoder.rotaries.kind_of_layer
    structs = []
    for layer, norms_after, kind in zip(layers, norms_after_parts, kinds, strict=True):
        native = _layer(layer, norms_after, kind)
        if native is None:
            return
        structs.append(native)
    first = _norm(layers[0].attention_norm) if before else None
    if first is None and before:
        return
    if encoder.rotaries is not None:
        rotaries: list[Any] = list(encoder.rotaries.kinds)
        pairs = {len(rotary.frequencies_P) for rotary in rotaries}
        if len(pairs) > 1 or pairs.pop() < LEAST_PAIRS:
            return
    runs = [layer.self_attn.attn.runs for layer in layers]
    kinds_of_runs = [None, *dict.fromkeys(run for run in runs if run is not None)]
    for native, run in zip(structs, runs, strict=True):
        native.runs = kinds_of_runs.index(run)
    encoder.fused = KernelEncoder(encoder, structs, first, kinds_of_runs, kernels)


class KernelEncoder:
    """Runs an encoder's layers.

    Args:
        first: the norm before the first layer of a model with norms before its halves.
        runs: the kinds of runs that its layers attend in; see `PackedAttention`.
    """

    def __init__(
        self,
        encoder: EncoderStack,
        layers: list[CEncoderLayer],
        first: CNorm | None,
        runs: list[str | None],
        kernels: Kernels,
    ):
        self.encoder, self.structs, self.first, self.kernels = encoder, layers, first, kernels
        self.runs = runs
        self.layers = (_P * len(layers))(*(ctypes.addressof(layer) for layer in layers))

    def run(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """As `EncoderStack.stack`; may overwrite x."""
        if current_adapters(x_TD) is not None or x_TD.dtype != torch.bfloat16:
            return self.encoder.stack(x_TD, positions_T)
        starts = [current_batch().starts_of(run).int().contiguous() for run in self.runs]
        addresses = (_P * len(starts))(*(each.data_ptr() for each in starts))
        counts = (ctypes.c_int64 * len(starts))(*(len(each) - 1 for each in starts))
        x_TD, rotaries = x_TD.contiguous(), self.encoder.rotaries
        kinds: list[Any] = [] if rotaries is None else list(rotaries.kinds)
        angles = [tuple(part.float().contiguous() for part in kind(positions_T)) for kind in kinds]
        cos, sin = ((_P * len(angles))(*(pair[i].data_ptr() for pair in angles)) for i in (0, 1))
        step = CEncoderStep(
            ctypes.addressof(cos), ctypes.addressof(sin), ctypes.addressof(addresses), ctypes.addressof(counts),
            angles[0][0].shape[1] if angles else 0,
        )  # fmt: skip
        y_TD = torch.empty_like(x_TD)
        first = None if self.first is None else ctypes.addressof(self.first)
        self.kernels.encoder(
            self.layers, len(self.structs), first, ctypes.addressof(step), x_TD.shape[1], x_TD.data_ptr(), y_TD.data_ptr()
        )  # fmt: skip
        return x_TD if first is None else y_TD


def _layer(layer: Any, norms: tuple[Norm | None, Norm | None], kind: int) -> CEncoderLayer | None:
    """None: the kernels do not support the layer."""
    attention, mlp = layer.self_attn, layer.mlp
    after_attention, after_mlp = (_norm(norm) for norm in norms)
    if after_attention is None or after_mlp is None or type(attention) is not SelfAttention:
        return None
    attn = attention.attn
    if not isinstance(attn, PackedAttention) or attention.q_norm is not None:
        return None
    refs = _products(mlp)
    if refs is None or attention.rope != (kind >= 0) or attention.interleaved:
        return None
    products = (attention.qkv.ref, attention.o_proj.ref, *refs)
    qkv, o, up, down = (ref.kernel_weight() for ref in products)
    if qkv is None or o is None or up is None or down is None or refs[0].prepared is None:
        return None
    native = CEncoderLayer(
        qkv, o, up, down, after_attention, after_mlp, None, attn.num_heads, attn.num_kv_heads, attn.head_dim,
        attn.window or 0, refs[0].prepared.kernel_act, 0, kind, 0, attn.scale,
    )  # fmt: skip
    if (bias_HL := attn.bias_HL()) is not None:
        native.references = scaled_bias(bias_HL)
        native.bias, native.distances = native.references.data_ptr(), (bias_HL.shape[1] + 1) // 2
    return native


def _products(mlp: nn.Module) -> tuple[Any, Any] | None:
    """The two weights of an MLP."""
    if type(mlp) is GatedMLP:
        return mlp.gate_up.ref, mlp.down_proj.ref
    if type(mlp) is UngatedMLP:
        return mlp.up_proj.ref, mlp.down_proj.ref
    return None
