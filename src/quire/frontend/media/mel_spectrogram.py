"""Mel spectrograms as torchaudio computes them: powers of a short-time Fourier transform, in triangles on the mel scale of HTK.

Runs in a media process. Knows NumPy; gets tensors of torch, and returns such, without importing it.

Shape suffixes: N samples, F frequencies, M mel bins, T frames, B batch, W samples of a window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


class MelSpectrogram:
    """`torchaudio.transforms.MelSpectrogram` with its defaults: a periodic Hann window, reflected ends, no normalization.

    Args:
        sample_rate: samples a second.
        n_fft, win_length, hop_length: in samples.
        n_mels: mel bins, from 0 Hz to half the sample rate.
    """

    def __init__(self, sample_rate: int, n_fft: int, win_length: int, hop_length: int, n_mels: int):
        self.n_fft, self.hop_length = n_fft, hop_length
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(win_length) / win_length)
        before = (n_fft - win_length) // 2
        self.window_W = np.pad(hann, (before, n_fft - win_length - before))
        self.filters_FM = mel_filters(sample_rate, n_fft // 2 + 1, n_mels)

    def to(self, device: Any) -> MelSpectrogram:
        """Media processes have no other device than the CPU."""
        return self

    def __call__(self, samples_BN: Any) -> Any:
        """A tensor [B, M, T] of the type of the samples."""
        half = self.n_fft // 2
        padded_BN = np.pad(samples_BN.numpy(), ((0, 0), (half, half)), mode="reflect")
        frames_BTW = sliding_window_view(padded_BN, self.n_fft, axis=1)[:, :: self.hop_length]
        powers_BTF = np.abs(np.fft.rfft(frames_BTW * self.window_W)) ** 2
        return samples_BN.new_tensor((powers_BTF @ self.filters_FM).swapaxes(1, 2))


def mel_filters(sample_rate: int, bins: int, n_mels: int) -> np.ndarray:
    """[F, M]: triangles of height 1, evenly spaced in mel = 2595 log10(1 + hertz / 700)."""
    half = sample_rate / 2
    most_mel = 2595 * np.log10(1 + half / 700)
    corners = 700 * (10 ** (np.linspace(0, most_mel, n_mels + 2) / 2595) - 1)
    widths = np.diff(corners)
    hertz_F1 = np.linspace(0, half, bins)[:, None]
    rising_FM = (hertz_F1 - corners[:-2]) / widths[:-1]
    falling_FM = (corners[2:] - hertz_F1) / widths[1:]
    found: np.ndarray = np.minimum(rising_FM, falling_FM).clip(min=0)
    return found
