"""Sound for audio towers: the processor of Transformers makes tensors of samples, and says what text replaces the placeholder.

Runs in a media process. Knows processors of Transformers, and what some of them lack. Does not know files.

Shape suffixes: N samples, M mel bins, W windows, F frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

RATE = 16_000


def rate_of(processor: Any) -> int:
    """Samples a second that it takes."""
    return int(getattr(processor._audio_processor, "sampling_rate", RATE))


def sound_tensors(samples_N: np.ndarray, processor: Any) -> tuple[dict[str, np.ndarray], str]:
    """(what the tower takes, the text that replaces the placeholder).

    Raises:
        Exception: the processor refuses this sound, in its own way.
    """
    if (own := OWN.get(type(processor).__name__)) is not None:
        return own(samples_N, processor)
    init = getattr(processor.tokenizer, "init_kwargs", {})
    options = processor._merge_kwargs(tokenizer_init_kwargs=init)["audio_kwargs"]
    options |= {"return_tensors": "np", "sampling_rate": rate_of(processor)}
    found, replacements = processor._process_audio([samples_N], **options)
    return arrays(found), replacements[0]


def arrays(found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in found.items()}


def voxtral_tensors(samples_N: np.ndarray, processor: Any) -> tuple[dict[str, np.ndarray], str]:
    """Transformers' processor leaves prompts with sound to mistral-common: a row for each 8 frames of windows of 30 s."""
    options = dict(processor.audio_kwargs, return_tensors="np")
    frames = options.pop("max_source_positions")
    extractor = processor.feature_extractor
    mel_MF = extractor(samples_N, **options)["input_features"].reshape(extractor.feature_size, -1, frames)  # fmt: skip
    rows = mel_MF.shape[1] * frames // 8
    return {"input_features": mel_MF.transpose(1, 0, 2)}, processor.audio_token * rows


OWN = {"VoxtralProcessor": voxtral_tensors}
"""By class of Transformers: what takes the place of its `_process_audio`."""


def prepare_for_sound(processor: str) -> None:
    """Granite-Speech's feature extractor takes one class of torchaudio, whose builds fit one build of torch each: ours computes the same."""
    if processor == "GraniteSpeechProcessor":
        from quire.frontend.media.mel_spectrogram import MelSpectrogram

        module = import_module(
            "transformers.models.granite_speech.feature_extraction_granite_speech"
        )
        transforms = SimpleNamespace(MelSpectrogram=MelSpectrogram)
        vars(module).update(torchaudio=SimpleNamespace(transforms=transforms), requires_backends=lambda *_: None)  # fmt: skip
