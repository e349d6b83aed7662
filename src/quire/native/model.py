"""Describes a model to the CPU kernels, from token ids to logits: embedding table, layers, last norm, head.

Knows native models whose decoder is fused (`native/fused_decoder.py`). Does not know rows or sampling.
"""

from __future__ import annotations

import ctypes

import torch

from quire.layers.embedding import Embedding, Head
from quire.models.base import CausalLM, Decoder
from quire.native.fused_decoder import FusedDecoder
from quire.ops.cpu.structs import CModel, CWeight
from quire.quantization.bf16_packed import PackedBf16Weight
from quire.quantization.gguf_blocks import BlocksWeight


def native_model(model: object) -> CModel | None:
    """None if the kernels do not support some part of the model, or its cache is not allocated yet."""
    if not isinstance(model, CausalLM) or type(model.model) is not Decoder:
        return None
    if any(
        getattr(type(model), name) is not getattr(CausalLM, name)
        for name in ("embed", "forward", "logits")
    ):
        return None
    decoder = model.model
    if (rotary := decoder.rotary.shared) is None:
        return None
    table, head, fused = _table(decoder.embed_tokens), _head(model.lm_head), decoder.layers.fused
    if table is None or head is None or not isinstance(fused, FusedDecoder):
        return None
    if (run := fused.whole) is None:
        return None
    if [layer.kv_group for layer, _ in fused.firsts] != list(range(len(fused.firsts))):
        return None  # the kernel takes the first block tables of a row; the others are of another model
    cos_LP, sin_LP = (part.float().contiguous() for part in rotary.table())
    found = CModel(
        head, ctypes.addressof(run.layers), ctypes.addressof(run.groups), cos_LP.data_ptr(), sin_LP.data_ptr(),
        decoder.norm.weight.data_ptr(), *table[:2],
        run.count, len(fused.firsts), *cos_LP.shape, table[2], model.vocab_size, decoder.norm.eps,
    )  # fmt: skip
    found.references = model, run, cos_LP, sin_LP
    return found


def _table(embedding: Embedding) -> tuple[int, int | None, bool] | None:
    """The table's address, that of the description of its blocks, and whether it is packed as an LM head; None if the
    kernels do not support it."""
    if type(embedding) is not Embedding or embedding.scale is not None:
        return None
    weight = embedding.weight
    if (packed := embedding.packed) is not None:
        if isinstance(packed, BlocksWeight):
            return packed.data.data_ptr(), packed.blocks.data_ptr(), False
        return (packed.address, None, True) if isinstance(packed, PackedBf16Weight) else None
    fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()
    return (weight.data_ptr(), None, False) if fits else None


def _head(head: Head) -> CWeight | None:
    prepared = head.ref.prepared
    if type(head) is not Head or prepared is None or prepared.kernels is None:
        return None
    if head.scale != 1.0 or head.softcap is not None or head.ref.bias is not None:
        return None
    return CWeight(**prepared.kernel_args(), outs=prepared.padded, ins=prepared.ins)
