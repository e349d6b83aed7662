"""The log-mel spectrogram of Whisper, from which several models hear.

Hann windows of 25 ms each 10 ms, 80 or 128 bins up to 8 kHz (Slaney's scale and norm), logarithms within 8 of the loudest.
Source: arXiv 2212.04356.

Shape suffixes: N samples, F frames, B frequencies, M mel bins.
"""

from __future__ import annotations

from functools import cache

import numpy as np

RATE = 16_000
WINDOW = 400
HOP = 160
STEP = 3000  # frames that are transformed at once


def log_mel(samples_N: np.ndarray, mels: int, num_frames: int) -> np.ndarray:
    """mel_MF, float32: of at most num_frames frames; what is missing is silence."""
    count = num_frames * HOP
    padded_N = np.zeros(count, np.float32)
    padded_N[: min(len(samples_N), count)] = samples_N[:count]
    around_N = np.pad(padded_N, WINDOW // 2, mode="reflect")
    frames_FW = np.lib.stride_tricks.sliding_window_view(around_N, WINDOW)[::HOP][:num_frames]
    hann_W = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    filters_BM, out_FM = mel_filters(mels), np.empty((num_frames, mels), np.float64)
    for start in range(0, num_frames, STEP):
        part_FW = frames_FW[start : start + STEP] * hann_W
        power_FB = np.abs(np.fft.rfft(part_FW, axis=1)) ** 2
        out_FM[start : start + STEP] = power_FB @ filters_BM
    log_FM = np.log10(np.maximum(out_FM, 1e-10))
    log_FM = (np.maximum(log_FM, log_FM.max() - 8) + 4) / 4
    return np.ascontiguousarray(log_FM.T, np.float32)


@cache
def mel_filters(mels: int) -> np.ndarray:
    """filters_BM: triangles between neighbouring mel frequencies, each of area 1."""
    hertz_B = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    edges = mel_to_hertz(np.linspace(0, hertz_to_mel(RATE / 2), mels + 2))
    widths = np.diff(edges)
    rise_BM = (hertz_B[:, None] - edges[None, :-2]) / widths[:-1]
    fall_BM = (edges[None, 2:] - hertz_B[:, None]) / widths[1:]
    triangles_BM = np.maximum(0, np.minimum(rise_BM, fall_BM))
    filters_BM: np.ndarray = triangles_BM * (2 / (edges[2:] - edges[:-2]))
    return filters_BM


LINEAR = 200 / 3  # hertz a mel, below BREAK
BREAK = 1000.0
LOG_STEP = np.log(6.4) / 27


def hertz_to_mel(hertz: float) -> float:
    """Slaney's scale: linear, then logarithmic."""
    if hertz < BREAK:
        return hertz / LINEAR
    return float(BREAK / LINEAR + np.log(hertz / BREAK) / LOG_STEP)


def mel_to_hertz(mels: np.ndarray) -> np.ndarray:
    above = BREAK * np.exp(LOG_STEP * (mels - BREAK / LINEAR))
    return np.where(mels < BREAK / LINEAR, mels * LINEAR, above)


def quiet_cuts(
    samples_N: np.ndarray, most: int, search: int = RATE, quiet: int = 1600
) -> list[int]:
    """Where to cut sound into windows of at most `most` samples: at the quietest `quiet` samples of each window's last `search`.

    Returns the begin of each window, 0 first.
    """
    cuts, start = [0], 0
    search = min(search, most // 2)
    while len(samples_N) - start > most:
        region = samples_N[start + most - search : start + most].astype(np.float64) ** 2
        size = min(quiet, len(region))
        sums = np.concatenate(([0.0], np.cumsum(region)))
        energy = sums[size:] - sums[:-size]
        start += most - search + int(energy.argmin()) + size // 2
        cuts.append(start)
    return cuts
