"""Mel spectrograms without torchaudio: those of Transformers' NumPy functions with the same settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from audio_checkpoints import RATE, sound
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from quire.frontend.media.mel_spectrogram import MelSpectrogram, mel_filters


@pytest.mark.parametrize("mels", [24, 80])
def test_it_is_the_spectrogram_of_htk(mels: int):
    filters_FM = mel_filter_bank(257, mels, 0.0, RATE / 2, RATE, norm=None, mel_scale="htk")
    np.testing.assert_allclose(mel_filters(RATE, 257, mels), filters_FM, atol=1e-9)
    made = MelSpectrogram(RATE, 512, 400, 160, mels).to("cpu")
    for samples_N in (sound(1, 0.9), sound(2, 0.05)):
        expected_MT = spectrogram(
            samples_N, window_function(400, "hann"), 400, 160, fft_length=512, power=2.0, center=True, pad_mode="reflect",
            mel_filters=filters_FM,
        )  # fmt: skip
        found_BMT = made(torch.from_numpy(samples_N)[None])
        assert found_BMT.dtype == torch.float32
        assert expected_MT.shape == found_BMT.shape[1:]
        np.testing.assert_allclose(found_BMT[0].numpy(), expected_MT, rtol=2e-3, atol=1e-5)
