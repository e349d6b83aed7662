"""Whisper checkpoints of random weights for `python -m benchmarks speech`, in the formats of all engines.

Knows the layouts of files. Does not know engines. The tokenizer has made-up words at the places of real ones, and the special tokens
where a real Whisper has them: each engine finds its languages, tasks and times.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"base": (512, 6, 8), "small": (768, 12, 12), "test": (64, 2, 2)}
"""hidden_size, layers of the encoder and of the decoder, heads"""
MELS, STATES, TEXT_LENGTH, BINS = 80, 1500, 448, 201
WORDS, LANGUAGES = 50257, 99
END, START, FIRST_TASK = WORDS, WORDS + 1, WORDS + 2 + LANGUAGES
TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
FIRST_TIME = FIRST_TASK + len(TASKS)
VOCAB = FIRST_TIME + 1501
PROMPT = [START, START + 1, FIRST_TASK + 1, FIRST_TASK + 5]
"""<|startoftranscript|>, the first language, <|transcribe|>, <|notimestamps|>"""


def specials() -> list[str]:
    """The special tokens, from number WORDS on."""
    codes = ["en", *(f"{chr(97 + n // 26)}{chr(97 + n % 26)}x" for n in range(1, LANGUAGES))]
    times = [f"<|{number / 50:.2f}|>" for number in range(1501)]
    return ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in codes), *(f"<|{task}|>" for task in TASKS), *times]  # fmt: skip


def checkpoint(shape: str, folder: Path) -> Path:
    """A directory in the form of Transformers, in bfloat16; made once."""
    import torch
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    path = folder / f"whisper-{shape}"
    if (done := path / "done").exists():
        return path
    hidden, layers, heads = SHAPES[shape]
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), END)
    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=MELS, d_model=hidden, encoder_layers=layers, decoder_layers=layers, num_hidden_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * hidden, decoder_ffn_dim=4 * hidden,
        max_source_positions=STATES, max_target_positions=TEXT_LENGTH, decoder_start_token_id=START, **ends,
    )  # fmt: skip
    torch.manual_seed(0)
    WhisperForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer(path)
    WhisperFeatureExtractor(feature_size=MELS).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(generation(ends)), encoding="utf-8")
    done.touch()
    return path


def generation(ends: dict[str, int]) -> dict[str, Any]:
    names = specials()
    return {
        **ends, "decoder_start_token_id": START, "is_multilingual": True, "no_timestamps_token_id": FIRST_TASK + 5, "max_length": TEXT_LENGTH,
        "lang_to_id": {name: START + 1 + n for n, name in enumerate(names[2 : 2 + LANGUAGES])},
        "task_to_id": {"translate": FIRST_TASK, "transcribe": FIRST_TASK + 1}, "prev_sot_token_id": FIRST_TASK + 3,
    }  # fmt: skip


def words() -> list[str]:
    """Of the tokens that are text: letters, and then made-up ones."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, *(f"w{number}" for number in range(len(letters), WORDS))]


def tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import ByteLevel

    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words())}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevel()
    names = specials()
    made.add_special_tokens(names[:-1501])
    made.add_tokens(names[-1501:])
    made.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **dict.fromkeys(("eos_token", "bos_token", "pad_token"), "<|endoftext|>")}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


# -- whisper.cpp ---------------------------------------------------------------------------------
PLACES = [
    ("embed_positions.weight", "positional_embedding"), ("embed_tokens", "token_embedding"), (".layers.", ".blocks."),
    ("encoder.layer_norm", "encoder.ln_post"), ("decoder.layer_norm", "decoder.ln"),
    ("encoder_attn_layer_norm", "cross_attn_ln"), ("encoder_attn", "cross_attn"), ("self_attn_layer_norm", "attn_ln"),
    ("self_attn", "attn"), ("final_layer_norm", "mlp_ln"), ("fc1", "mlp.0"), ("fc2", "mlp.2"),
    ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"),
]  # fmt: skip
"""Name in a checkpoint of Transformers -> OpenAI's, which whisper.cpp reads; in this order."""
FLOAT32 = ("encoder.positional_embedding", "decoder.positional_embedding")


def ggml(path: Path) -> Path:
    """The checkpoint as whisper.cpp's file, in float16; made once, beside it."""
    file = path.with_suffix(".ggml")
    if file.exists():
        return file
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    draft = file.with_suffix(".new")
    with draft.open("wb") as out:
        sizes = [VOCAB]
        for kind, positions in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):  # fmt: skip
            sizes += [config[positions], config["d_model"], config[f"{kind}_attention_heads"], config[f"{kind}_layers"]]  # fmt: skip
        out.write(b"lmgg" + struct.pack("<11i", *sizes, MELS, 1))
        out.write(struct.pack("<2i", MELS, BINS) + mel_filters().tobytes())
        out.write(struct.pack("<i", WORDS))
        for word in words():
            raw = raw_bytes(word)
            out.write(struct.pack("<i", len(raw)) + raw)
        for name, tensor in tensors(path):
            wide = tensor.ndim < 2 or name in FLOAT32
            if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
                tensor = tensor[:, None]
            raw = name.encode()
            out.write(struct.pack(f"<3i{tensor.ndim}i", tensor.ndim, len(raw), int(not wide), *tensor.shape[::-1]) + raw)  # fmt: skip
            out.write(tensor.astype(np.float32 if wide else np.float16).tobytes())
    draft.rename(file)
    return file


SHOWN = frozenset([*range(33, 127), *range(161, 173), *range(174, 256)])
HIDDEN = [number for number in range(256) if number not in SHOWN]


def raw_bytes(word: str) -> bytes:
    """What a word of a byte-level tokenizer stands for: bytes that cannot be printed are letters from number 256 on."""
    return bytes(
        HIDDEN[ord(letter) - 256] if ord(letter) >= 256 else ord(letter) for letter in word
    )


def mel_filters() -> np.ndarray:
    """[MELS, BINS], float32."""
    from transformers import WhisperFeatureExtractor

    found: np.ndarray = np.ascontiguousarray(
        WhisperFeatureExtractor(feature_size=MELS).mel_filters.T, np.float32
    )
    return found


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(OpenAI's name, float32)"""
    from safetensors.torch import load_file

    for name, tensor in load_file(path / "model.safetensors").items():
        plain = name.removeprefix("model.")
        if plain.startswith("proj_out"):  # the head is the embeddings
            continue
        for own, other in PLACES:
            plain = plain.replace(own, other)
        yield plain, tensor.float().numpy()
