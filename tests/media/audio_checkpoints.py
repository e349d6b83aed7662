"""Tiny random checkpoints of models that hear, with a tokenizer, a chat template and a feature extractor; and sound.

Knows configurations of Transformers. Does not know Quire.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import vision_checkpoints
from vision_checkpoints import AT, TEMPLATE, TEXT

RATE = 16_000
MELS = 24
WHISPER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": MELS,
}  # fmt: skip
NAMES = {"audio_token": "<|audio|>", "audio_bos_token": "<|image_start|>", "audio_eos_token": "<|image_end|>"}  # fmt: skip
AROUND = "<|image_start|><|audio|><|image_end|>"
EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS}
GEMMA4 = vision_checkpoints.GEMMA4
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {
        "config": {
            "text_config": {"model_type": "qwen2", **TEXT}, "audio_token_index": AT["<|audio|>"],
            "audio_config": {"model_type": "qwen2_audio_encoder", **WHISPER, "max_source_positions": 100},
        },
        "architecture": "Qwen2AudioForConditionalGeneration",
        "processor": {"processor_class": "Qwen2AudioProcessor"},
        "preprocessor": {**EXTRACTOR, "chunk_length": 2},
        "tokens": NAMES,
        "placeholder": AROUND,
    },
    "voxtral": {
        "config": {
            "text_config": {"model_type": "llama", **TEXT, "head_dim": 16, "max_position_embeddings": 2048}, "audio_token_id": 24,
            "audio_config": {
                "model_type": "voxtral_encoder", "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_mel_bins": MELS, "max_source_positions": 1500,
            },
        },
        "architecture": "VoxtralForConditionalGeneration",
        "processor": {"processor_class": "VoxtralProcessor"},
        "preprocessor": EXTRACTOR,
        "placeholder": vision_checkpoints.SPECIAL[24],
        "engine": {"max_model_len": 2048, "max_num_batched_tokens": 256},
    },
    "gemma4_audio": {
        **GEMMA4,
        "model_type": "gemma4",
        "config": {
            **GEMMA4["config"],
            "audio_config": {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [128, 4],
                "output_proj_dims": 24,
            },
        },
        "architecture": "Gemma4ForConditionalGeneration",
        "preprocessor": {**GEMMA4["preprocessor"], "feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "placeholder": "<|audio|>",
    },
}  # fmt: skip


def make_checkpoint(kind: str, folder: Path) -> str:
    made = CHECKPOINTS[kind]
    config = transformers.AutoConfig.for_model(made.get("model_type", kind), **made["config"])
    model = getattr(transformers, made["architecture"])(config)
    vision_checkpoints.draw_weights(model, len(kind))
    model.save_pretrained(folder)
    return vision_checkpoints.save_processor(made, folder, TEMPLATE)


def kinds_of(path: str) -> list[str]:
    """Kinds of media for which a checkpoint has a processor."""
    file = json.loads((Path(path) / "preprocessor_config.json").read_text())
    sees, hears = "image_processor_type" in file, "feature_extractor_type" in file
    return ["image"] * sees + ["audio"] * hears


def engine_options(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {**vision_checkpoints.CHECKPOINTS, **CHECKPOINTS}[kind].get("engine", {})  # fmt: skip
    return found


@cache
def transformers_model(path: str, architecture: str) -> Any:
    kind = getattr(transformers, architecture)
    return kind.from_pretrained(path, dtype=torch.float32).eval()


def sound(number: int = 0, seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    """Samples of a few tones and noise, between -1 and 1."""
    draw = np.random.default_rng(number)
    times = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * hertz * times) for hertz in draw.uniform(100, 4000, 3))
    return (0.2 * tones + 0.05 * draw.standard_normal(len(times))).astype(np.float32)
