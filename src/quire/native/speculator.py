"""Describes a speculator to the CPU kernels: what joins embeddings and states, its layers, and the table and head that it uses.

Knows EAGLE, EAGLE-3 and MTP of one layer; the others run as modules. Does not know rows, or how many tokens are guessed.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, cast

from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.models.base import CausalLM
from quire.models.speculators.base import Speculator
from quire.models.speculators.eagle import Eagle, Eagle3, Eagle3Layer
from quire.models.speculators.mtp import NextTokenLayers
from quire.native.fused_decoder import StepGroup
from quire.native.fused_layers import (
    fill_attention,
    has_default_methods,
    has_mlp,
    native_layer,
    native_norm,
)
from quire.native.model import keeps, native_ends, tables_of
from quire.ops.cpu.structs import CLayer, CModel, CSpeculator, CWeight


class _Around(NamedTuple):
    """What is around the layers of a speculator."""

    embedding_norm: Norm | None
    state_norm: Norm | None
    last_norm: Norm | None
    states: Linear | None = None
    join: Linear | None = None


def native_speculator(model: Speculator) -> CSpeculator | None:
    """None if the kernels do not support some part, or the cache is not allocated yet."""
    target, decoder, around = model.target[0], model.model, _around(model)
    if not isinstance(target, CausalLM) or not keeps(target, "embed", "logits"):
        return None
    embedding = decoder.embed_tokens or target.model.embed_tokens
    ends = native_ends(embedding, model.lm_head or target.lm_head)
    layers = _layers(model)
    if around is None or ends is None or not layers or target.model.ranks is not None:
        return None
    norms = [native_norm(norm) for norm in around[:3]]
    weights = [CWeight() if each is None else each.ref.kernel_weight() for each in around[3:]]
    if None in norms or None in weights:
        return None
    kv_group = model.attention_layers()[0].kv_group
    group, tables = tables_of(decoder, StepGroup(kv_group, 0, None))
    addresses = (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))
    groups = (ctypes.c_int64 * len(layers))()
    own = CModel(
        norm=norms[2], layers=ctypes.addressof(addresses), group_of_layer=ctypes.addressof(groups), groups=ctypes.addressof(group),
        count=len(layers), num_groups=1, positions=len(tables[0]), vocab=model.cfg.get("draft_vocab_size") or model.vocab_size, **ends,
    )  # fmt: skip
    ids_V = model.target_ids_V
    found = CSpeculator(
        own, weights[0], norms[0], norms[1], weights[1], None if ids_V is None else ids_V.data_ptr(), target.vocab_size,
        getattr(decoder.layers[0], "norm_before_residual", False), getattr(model, "head_norm", None) is not None,
    )  # fmt: skip
    found.references = model, layers, addresses, groups, group, tables
    return found


def _around(model: Speculator) -> _Around | None:
    """None: the kernels do not compute it."""
    if type(model) is Eagle3 and model.input_norm is None and not model.fc_norm:
        first: Any = model.model.layers[0]
        last = model.head_norm or model.model.norm
        return _Around(first.input_layernorm, first.hidden_norm, last, states=model.fc)
    if type(model) is Eagle:
        fusion: Any = model.fusion
        return _Around(fusion.embedding_norm, fusion.state_norm, None, join=fusion.fc)
    if isinstance(model, NextTokenLayers) and type(model).forward is NextTokenLayers.forward:
        fusion, norm = model.fusions[0], cast("Norm", model.norms[0])
        return _Around(fusion.embedding_norm, fusion.state_norm, norm, join=fusion.fc)
    return None


def _layers(model: Speculator) -> list[CLayer]:
    """Empty if the kernels do not compute all of them, or they differ in their blocks or positions."""
    decoder, found = model.model, list[CLayer]()
    attentions = model.attention_layers()
    if len(decoder.rotary.kinds) != 1 or len({each.kv_group for each in attentions}) != 1:
        return []
    if isinstance(model, NextTokenLayers) and len(decoder.layers) > 1:
        return []  # each has its own norm, and all run in the first pass
    rotary: Any = decoder.rotary.kinds[0]
    layer: Any
    for layer in decoder.layers:
        pairs = len(rotary.frequencies_P)
        native = native_layer(layer, pairs)
        if isinstance(layer, Eagle3Layer):
            native.joined = True
            fill_attention(layer.self_attn, pairs, native)
        if (
            native.qkv.data is None
            or not has_mlp(native)
            or not has_default_methods(layer, "finish")
        ):
            return []
        if layer.self_attn.query_scale is not None:
            return []
        found.append(native)
    return found
