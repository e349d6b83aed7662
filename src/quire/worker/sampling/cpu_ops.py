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
from quire.worker.sampling.top_k_top_p import Cutoff, SamplingLimits


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

    def draw_top_k_top_p(
        self, scaled_SV: Tensor, limits: SamplingLimits, keys_2S: Tensor
    ) -> Tensor:
        return self.draw(scaled_SV, keys_2S, self.cutoff(scaled_SV, limits))

    def cutoff(self, scaled_SV: Tensor, limits: SamplingLimits) -> Cutoff:
        logits_SV = _rows(scaled_SV)
        count, vocab = logits_SV.shape
        top_k = np.ascontiguousarray(limits.top_k, np.int64)
        top_p = np.ascontiguousarray(limits.top_p, np.float64)
        log_min_p = _log(limits.min_p)
        cut = Cutoff(torch.empty(count), torch.empty(count, dtype=torch.int64))
        self.kernels.cut(
            logits_SV.data_ptr(), logits_SV.stride(0), top_k.ctypes.data, top_p.ctypes.data, log_min_p.ctypes.data,
            count, vocab, cut.logits_S.data_ptr(), cut.ids_S.data_ptr(),
        )  # fmt: skip
        return cut

    def sample(
        self,
        logits_SV: Tensor,
        temperature_S: np.ndarray,
        limits: SamplingLimits,
        seeds_S: np.ndarray,
        lengths_S: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        """See `SamplerOps.sample`."""
        is_bf16 = logits_SV.dtype == torch.bfloat16 and logits_SV.stride(1) == 1
        logits_SV = logits_SV if is_bf16 else _rows(logits_SV)
        count, vocab = logits_SV.shape
        log_min_p = _log(limits.min_p) if any(limits.min_p.tolist()) else None
        tokens_S, whole_S = torch.empty(count, dtype=torch.int64), torch.empty(count)
        self.kernels.sample(
            logits_SV.data_ptr(), logits_SV.stride(0), is_bf16, temperature_S.ctypes.data,
            limits.top_k.ctypes.data, limits.top_p.ctypes.data, None if log_min_p is None else log_min_p.ctypes.data,
            seeds_S.ctypes.data, lengths_S.ctypes.data, count, vocab, tokens_S.data_ptr(), whole_S.data_ptr(),
        )  # fmt: skip
        return tokens_S, whole_S


def _log(min_p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        found: np.ndarray = np.log(min_p)
    return found


def _rows(logits_SV: Tensor) -> Tensor:
    """float32, with contiguous rows."""
    logits_SV = logits_SV.float()
    return logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()


def native(kernels: Kernels) -> SamplerOps:
    """The functions of a sampler on a CPU."""
    how = CpuSamplerOps(kernels)
    return SamplerOps(how.draw, how.draw_top_k_top_p, how.cutoff, sample=how.sample)
