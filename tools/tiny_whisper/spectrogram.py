"""The log-mel spectrogram of a batch of windows, in torch: the numbers of `quire.frontend.media.log_mel`, in float32.

Shape suffixes: B windows, N samples, F frames, W samples of a frame, M mel bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.frontend.media.log_mel import HOP, WINDOW, mel_filters

MELS = 80


@cache
def constants() -> tuple[Tensor, Tensor]:
    """(hann_W, filters_KM), for K frequencies."""
    filters = torch.from_numpy(mel_filters(MELS)).float()
    return torch.hann_window(WINDOW), filters


def spectrograms(windows: Sequence[np.ndarray], samples: int) -> Tensor:
    """mel_BMF, for windows of at most this number of samples; missing samples are silence."""
    padded_BN = torch.zeros(len(windows), samples)
    for row, samples_N in zip(padded_BN, windows, strict=True):
        row[: len(samples_N)] = torch.from_numpy(samples_N)
    hann_W, filters_KM = constants()
    around_BN = torch.nn.functional.pad(padded_BN, (WINDOW // 2, WINDOW // 2), mode="reflect")
    frames_BFW = around_BN.unfold(-1, WINDOW, HOP)[:, :-1] * hann_W
    power = torch.fft.rfft(frames_BFW).abs() ** 2
    log_BFM = (power @ filters_KM).clamp(min=1e-10).log10()
    log_BFM = torch.maximum(log_BFM, log_BFM.amax((1, 2), keepdim=True) - 8)
    return ((log_BFM + 4) / 4).transpose(1, 2).contiguous()


def masked(mel_BMF: Tensor, generator: torch.Generator) -> Tensor:
    """Some bands of mel bins and some moments hidden, so that the model does not lean on one of them (arXiv 1904.08779)."""
    count, mels, frames = mel_BMF.shape
    out = mel_BMF.clone()
    for size, most, axis in ((mels, 12, 1), (mels, 12, 1), (frames, 12, 2), (frames, 12, 2)):
        widths = torch.randint(0, most + 1, (count, 1), generator=generator)
        starts = torch.randint(0, size - most, (count, 1), generator=generator)
        at = torch.arange(size)[None]
        hidden = (at >= starts) & (at < starts + widths)
        hidden = hidden[:, :, None] if axis == 1 else hidden[:, None, :]
        out = torch.where(hidden, out.mean((1, 2), keepdim=True), out)
    return out
