"""Sampling with the CPU kernels: one pass over the logits for a draw or a cutoff, where torch makes a dozen.

Knows which kernel implements which function. Does not know how the kernels work (`ops/cpu/kernels`).

Shape suffixes: S rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.ops.cpu.bindings import Kernels
from quire.worker.sampling.sampler_ops import SamplerOps
from quire.worker.sampling.top_k_top_p import Cutoff


class CpuSamplerOps:
    """`draw`, `draw_top_k_top_p` and `cutoff` equal the torch functions; `sample` does all of a draw in one pass."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels

    def draw(self, scaled_SV: Tensor, keys_2S: Tensor, cut: Cutoff | None = None) -> Tensor:
        logits_SV, keys_2S = _rows(scaled_SV), keys_2S.contiguous()
        count, vocab = logits_SV.shape
        tokens_S = torch.empty(count, dtype=torch.int64)
        self.kernels.draw(
            logits_SV.data_ptr(), logits_SV.stride(0), keys_2S[0].data_ptr(), keys_2S[1].data_ptr(),
            None if cut is None else cut.logits_S.data_ptr(), None if cut is None else cut.ids_S.data_ptr(),
            count, vocab, tokens_S.data_ptr(),
        )  # fmt: skip
        return tokens_S

    def draw_top_k_top_p(self, scaled_SV: Tensor, params_S: np.ndarray, keys_2S: Tensor) -> Tensor:
        return self.draw(scaled_SV, keys_2S, self.cutoff(scaled_SV, params_S))

    def cutoff(self, scaled_SV: Tensor, params_S: np.ndarray) -> Cutoff:
        logits_SV = _rows(scaled_SV)
        count, vocab = logits_SV.shape
        cut = Cutoff(torch.empty(count), torch.empty(count, dtype=torch.int64))
        self.kernels.cut(
            logits_SV.data_ptr(), logits_SV.stride(0), params_S.ctypes.data, count, vocab,
            cut.logits_S.data_ptr(), cut.ids_S.data_ptr(),
        )  # fmt: skip
        return cut

    def sample(
        self, logits_SV: Tensor, params_S: np.ndarray, lengths_S: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """See `SamplerOps.sample`."""
        is_bf16 = logits_SV.dtype == torch.bfloat16 and logits_SV.stride(1) == 1
        logits_SV = logits_SV if is_bf16 else _rows(logits_SV)
        count, vocab = logits_SV.shape
        tokens_S, max_logit_S = torch.empty(count, dtype=torch.int64), torch.empty(count)
        self.kernels.sample(
            logits_SV.data_ptr(), logits_SV.stride(0), is_bf16, params_S.ctypes.data,
            lengths_S.ctypes.data, count, vocab, tokens_S.data_ptr(), max_logit_S.data_ptr(),
        )  # fmt: skip
        return tokens_S, max_logit_S


def _rows(logits_SV: Tensor) -> Tensor:
    """float32, with contiguous rows."""
    logits_SV = logits_SV.float()
    return logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()


def cpu_ops(kernels: Kernels) -> SamplerOps:
    """The functions of a sampler on a CPU."""
    ops = CpuSamplerOps(kernels)
    return SamplerOps(ops.draw, ops.draw_top_k_top_p, ops.cutoff, sample=ops.sample)
