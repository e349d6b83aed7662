"""`ops/masked_argmax.py` by the CPU kernels.

Knows dtypes and strides. The results are the definition's, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops import masked_argmax
from quire.ops.cpu.bindings import best as library


def _has_kernel_layout(logits_SV: Tensor) -> bool:
    return logits_SV.dim() == 2 and logits_SV.stride(1) == 1 and logits_SV.numel() > 0


@masked_argmax.argmax.on("native")
def _argmax(logits_SV: Tensor, words_SW: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    kernels, dtype = library(), logits_SV.dtype
    if (
        kernels is None
        or dtype not in (torch.bfloat16, torch.float32)
        or not _has_kernel_layout(logits_SV)
    ):
        return masked_argmax.argmax.reference(logits_SV, words_SW)
    rows, vocab = logits_SV.shape
    tokens_S = torch.empty(rows, dtype=torch.int64)
    max_logit_S, max_allowed_logit_S = torch.empty(rows), torch.empty(rows)
    words = 0
    if words_SW is not None:
        words_SW = words_SW.contiguous()
        words = words_SW.data_ptr()
    kernels.masked_argmax(
        logits_SV.data_ptr(), logits_SV.stride(0), dtype == torch.bfloat16, words, rows, vocab,
        tokens_S.data_ptr(), max_logit_S.data_ptr(), max_allowed_logit_S.data_ptr(),
    )  # fmt: skip
    return tokens_S, max_logit_S, max_allowed_logit_S


@masked_argmax.mask_logits.on("native")
def _mask_logits(logits_SV: Tensor, words_SW: Tensor) -> Tensor:
    kernels = library()
    if kernels is None or logits_SV.dtype != torch.float32 or not _has_kernel_layout(logits_SV):
        return masked_argmax.mask_logits.reference(logits_SV, words_SW)
    words_SW = words_SW.contiguous()
    rows, vocab = logits_SV.shape
    kernels.mask_logits(logits_SV.data_ptr(), logits_SV.stride(0), words_SW.data_ptr(), rows, vocab)
    return logits_SV
