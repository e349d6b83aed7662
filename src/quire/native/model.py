"""Describes a model to the CPU kernels, from token ids to logits: embedding table, layers, last norm, head.

Knows native models whose decoder is fused (`native/fused_decoder.py`). Does not know rows or sampling.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from quire.layers.decoder import Decoder, ModelParts
from quire.layers.embedding import Embedding, Head
from quire.layers.native_parts import native_parts
from quire.native.fused_decoder import FusedDecoder, StepGroup, query_scales
from quire.ops.cpu.structs import CGroup, CModel, CWeight
from quire.quantization.bf16_packed import PackedBf16Weight
from quire.quantization.gguf_blocks import BlocksWeight


def native_model(model: Any) -> CModel | None:
    """None if the kernels do not support some part of the model, or its cache is not allocated yet."""
    if not isinstance(parts := native_parts(model), ModelParts):
        return None
    decoder = parts.decoder
    if decoder.stage.layout.pipeline > 1:
        return None
    ends, fused = native_ends(decoder.embed_tokens, parts.head), decoder.layers.fused
    if ends is None or not isinstance(fused, FusedDecoder):
        return None
    if (run := fused.whole) is None or run.norm is None:
        return None
    tables = [tables_of(decoder, group) for group in fused.groups]
    groups = (CGroup * len(tables))(*(group for group, _ in tables))
    native = CModel(
        norm=run.norm, layers=ctypes.addressof(run.layers), group_of_layer=ctypes.addressof(run.groups), groups=ctypes.addressof(groups),
        count=run.count, num_groups=len(groups), positions=len(tables[0][1][0]), vocab=model.vocab_size, **ends,
    )  # fmt: skip
    native.references = model, run, groups, tables
    return native


def native_ends(embedding: Embedding | None, lm_head: Head | None) -> dict[str, Any] | None:
    """The fields of the table and the head; None if the kernels do not support one of them."""
    if embedding is None or lm_head is None:
        return None
    table, head, ranks, scale = _table(embedding), _head(lm_head), embedding.ranks, embedding.scale
    if table is None or head is None or (ranks is not None and ranks.link is None):
        return None  # the kernels cannot exchange with these ranks
    return {
        "head": head, "logit_scale": lm_head.scale, "softcap": lm_head.softcap or 0.0,
        "table": table[0], "blocks": table[1], "packed": table[2], "words": embedding.words,
        "table_ranks": None if ranks is None else ranks.link,
        "embedding_scale": 1.0 if scale is None else float(torch.tensor(scale, dtype=torch.bfloat16)),
    }  # fmt: skip


def record_states(model: CModel, num_tokens: int) -> None:
    """Let a step of `num_tokens` write the hidden states that the model records now to `CausalLM.fast_states`."""
    causal: Any = model.references[0]
    numbers = causal.model.layers.recorded
    if numbers is model.recorded_numbers and num_tokens <= model.state_rows:
        return
    recorded = torch.tensor(sorted(numbers), dtype=torch.int64)
    model.num_recorded, model.state_rows = len(recorded), 1 << (num_tokens - 1).bit_length()
    sizes = len(recorded), model.state_rows, causal.cfg.hidden_size
    states = torch.empty(sizes, dtype=torch.bfloat16)
    causal.fast_states = dict(zip(recorded.tolist(), states, strict=True))
    model.recorded, model.states = recorded.data_ptr(), states.data_ptr()
    model.recorded_numbers, model.recorded_references = numbers, recorded


def tables_of(decoder: Decoder, group: StepGroup) -> tuple[CGroup, list[Tensor]]:
    """The struct of a group, and what it points to."""
    rotary: Any = decoder.rotary.kinds[group.rotary]
    tables = [part.float().contiguous() for part in rotary.table()]
    length, pairs = tables[0].shape
    if group.query_scale is not None:
        tables.append(query_scales(group.query_scale, length))
    addresses = [*(table.data_ptr() for table in tables), None][:3]
    return CGroup(*addresses, pairs, group.kv_group), tables


def _table(embedding: Embedding) -> tuple[int, int | None, bool] | None:
    """The table's address, the address of the description of its blocks, and whether it is packed as an LM head; None if the
    kernels do not support it."""
    if type(embedding) is not Embedding:
        return None
    weight = embedding.weight
    if (packed := embedding.packed) is not None:
        if isinstance(packed, BlocksWeight):
            return packed.data.data_ptr(), packed.blocks.data_ptr(), False
        return (packed.address, None, True) if isinstance(packed, PackedBf16Weight) else None
    fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()
    return (weight.data_ptr(), None, False) if fits else None


def _head(head: Head) -> CWeight | None:
    if type(head) is not Head or head.ref.bias is not None:
        return None
    return head.ref.kernel_weight(padded=True)
