"""Describes a speculator to the CPU kernels: what joins embeddings and states, its layers, and the table and head that it uses.

Knows the parts that a speculator declares (`SpeculatorParts`). Does not know rows, or how many tokens are guessed.
"""

from __future__ import annotations

import ctypes
from typing import Any

from quire.layers.decoder import Decoder, SpeculatorParts
from quire.layers.native_parts import layer_parts
from quire.native.fused_decoder import StepGroup
from quire.native.fused_layers import fill_attention, has_mlp, native_layer, native_norm
from quire.native.model import native_ends, tables_of
from quire.ops.cpu.structs import CLayer, CModel, CSpeculator, CWeight


def native_speculator(parts: SpeculatorParts) -> CSpeculator | None:
    """None if the kernels do not support some part, or the cache is not allocated yet."""
    ends, (layers, kv_groups) = native_ends(parts.embedding, parts.head), _layers(parts.decoder)
    if ends is None or not layers or len(kv_groups) != 1:
        return None
    norms = [
        native_norm(norm) for norm in (parts.embedding_norm, parts.state_norm, parts.last_norm)
    ]
    linears = parts.state_projection, parts.join
    weights = [CWeight() if linear is None else linear.ref.kernel_weight() for linear in linears]
    if None in norms or None in weights:
        return None
    group, tables = tables_of(parts.decoder, StepGroup(kv_groups.pop(), 0, None))
    addresses = (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))
    groups = (ctypes.c_int64 * len(layers))()
    model = CModel(
        norm=norms[2], layers=ctypes.addressof(addresses), group_of_layer=ctypes.addressof(groups), groups=ctypes.addressof(group),
        count=len(layers), num_groups=1, positions=len(tables[0]), vocab=parts.vocab_size, **ends,
    )  # fmt: skip
    ids_V = parts.target_ids_V
    native = CSpeculator(
        model, weights[0], norms[0], norms[1], weights[1], None if ids_V is None else ids_V.data_ptr(),
        parts.target_vocab_size, parts.normed_residual, parts.passes_sum,
    )  # fmt: skip
    native.references = parts, layers, addresses, groups, group, tables
    return native


def _layers(decoder: Decoder) -> tuple[list[CLayer], set[int]]:
    """The layers, and their KV groups; none if the kernels do not compute all of them, or their positions differ."""
    layers, kv_groups = list[CLayer](), set[int]()
    if len(decoder.rotary.kinds) != 1:
        return [], kv_groups
    rotary: Any = decoder.rotary.kinds[0]
    for layer in decoder.layers:
        pairs = len(rotary.frequencies_P)
        native, parts = native_layer(layer, pairs), layer_parts(layer)
        if parts is None or parts.finish is not None:
            return [], kv_groups
        if parts.joined_attention is not None:
            native.joined = True
            fill_attention(parts.joined_attention, pairs, native)
        attention: Any = parts.joined_attention or parts.attention
        if native.qkv.data is None or not has_mlp(native) or attention.query_scale is not None:
            return [], kv_groups
        kv_groups.add(attention.attn.kv_group)
        layers.append(native)
    return layers, kv_groups
