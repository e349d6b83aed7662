"""A tiny random Whisper checkpoint, with a tokenizer and its JSON files; and what Transformers computes with it.

Knows Transformers. Does not know Quire.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

STATES = 100  # of a window, which has 2 s
SECONDS = STATES / 50
LANGUAGES = ["en", "de", "fr", "ja", "zh"]
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", *[f"<|{name}|>" for name in LANGUAGES], "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
    *[f"<|{step / 50:.2f}|>" for step in range(STATES + 1)],
]  # fmt: skip
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
ID = {name: len(LETTERS) + at for at, name in enumerate(SPECIAL)}
VOCAB = len(LETTERS) + len(SPECIAL)
END, START, FIRST_TIME = ID["<|endoftext|>"], ID["<|startoftranscript|>"], ID["<|0.00|>"]
TEXT_LENGTH = 64
PLAIN = [LETTERS.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz.Ġ"]
SUPPRESSED = [id for id in range(END) if id not in PLAIN]  # so that texts are letters and spaces
SUPPRESSED += [START, *(ID[f"<|{name}|>"] for name in ("translate", "transcribe", "startoflm", "startofprev", "nospeech"))]  # fmt: skip
GENERATION: dict[str, Any] = {
    "begin_suppress_tokens": [LETTERS.index("Ġ"), END], "suppress_tokens": SUPPRESSED, "is_multilingual": True,
    "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END,
    "lang_to_id": {f"<|{name}|>": ID[f"<|{name}|>"] for name in LANGUAGES},
    "task_to_id": {name: ID[f"<|{name}|>"] for name in ("translate", "transcribe")},
    "no_timestamps_token_id": ID["<|notimestamps|>"], "max_initial_timestamp_index": 50, "max_length": TEXT_LENGTH,
    "prev_sot_token_id": ID["<|startofprev|>"], "return_timestamps": False,
}  # fmt: skip


def make_whisper(folder: Path, **more: Any) -> str:
    """A model that does not repeat itself, and whose norms and biases are not ones and zeros."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "num_mel_bins": 80, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4,
        "encoder_ffn_dim": 96, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 80,
        "max_source_positions": STATES, "max_target_positions": TEXT_LENGTH, "pad_token_id": END, "bos_token_id": END,
        "eos_token_id": END, "decoder_start_token_id": START, "num_hidden_layers": 2, **more,
    }  # fmt: skip
    torch.manual_seed(3)
    config = transformers.WhisperConfig(**settings)
    model = transformers.WhisperForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "encoder.embed_positions" in name:
                continue
            if weight.dim() == 1:
                weight.add_((0.2 if "weight" in name else 0.03) * torch.randn_like(weight))
            elif "embed" in name:
                weight.normal_(std=0.3 if "tokens" in name else 0.5)
            else:
                weight.normal_(std=0.5 / (1 if weight.dim() < 3 else 3))
    model.generation_config = GenerationConfig(**GENERATION)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    save_tokenizer(folder)
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=settings["num_mel_bins"], chunk_length=int(SECONDS)
    )
    extractor.save_pretrained(folder)
    return str(folder)


def save_tokenizer(folder: Path) -> None:
    vocab = {letter: at for at, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(SPECIAL[: ID["<|0.00|>"] - len(LETTERS)])
    tokenizer.add_tokens(SPECIAL[ID["<|0.00|>"] - len(LETTERS) :])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def sound(seconds: float, seed: int = 0, rate: int = 16_000) -> np.ndarray:
    """Tones that change, with noise and some silence: float32, between -1 and 1."""
    draw = np.random.default_rng(seed)
    count = int(seconds * rate)
    time = np.arange(count) / rate
    pieces = max(1, int(seconds * 3))
    pitch = np.repeat(draw.uniform(150, 3000, pieces), -(-count // pieces))[:count]
    level = np.repeat(draw.choice([0.0, 0.1, 0.5], pieces), -(-count // pieces))[:count]
    wave = level * np.sin(2 * np.pi * pitch * time) + 0.01 * draw.standard_normal(count)
    return wave.astype(np.float32).clip(-1, 1)


@cache
def model(path: str) -> Any:
    found = transformers.WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    return found.eval()


def features(path: str, wave: np.ndarray) -> torch.Tensor:
    """[1, mels, frames] of one window."""
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
    found: torch.Tensor = extractor(wave, sampling_rate=16_000, return_tensors="pt").input_features
    return found


def prefix(language: str = "en", task: str = "transcribe", timestamps: bool = True) -> list[int]:
    ids = [START, ID[f"<|{language}|>"], ID[f"<|{task}|>"]]
    return ids if timestamps else [*ids, ID["<|notimestamps|>"]]


@torch.inference_mode()
def greedy(
    path: str, mel: torch.Tensor, prompt: list[int], count: int, timestamps: bool = True
) -> list[int]:
    """The tokens that follow a prompt, up to the end or `count`, by Transformers' model and its rules."""
    net, config = model(path), GenerationConfig(**GENERATION)
    states = net.get_encoder()(mel)
    begin = len(prompt)
    rules = [
        SuppressTokensLogitsProcessor(GENERATION["suppress_tokens"]),
        SuppressTokensAtBeginLogitsProcessor(GENERATION["begin_suppress_tokens"], begin),
    ]
    if timestamps:
        rules.append(WhisperTimeStampLogitsProcessor(config, begin_index=begin))
    tokens = list(prompt)
    while len(tokens) < begin + count:
        ids = torch.tensor([tokens])
        scores = net(encoder_outputs=states, decoder_input_ids=ids).logits[:, -1].float()
        for rule in rules:
            scores = rule(ids, scores)
        tokens.append(int(scores.argmax()))
        if tokens[-1] == END:
            break
    return tokens[begin:]
