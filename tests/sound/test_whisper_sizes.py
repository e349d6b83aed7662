"""Whisper's other forms: large-v3 and distilled ones, whose encoder and decoder have other numbers of layers, and those that write English only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import whisper_checkpoint as whisper
from sound_server import TRANSLATIONS, SoundServer, wav
from whisper_checkpoint import END, ID, LETTERS, START

ONE = whisper.sound(1.3, 11)
GREEDY = {"temperature_increment_on_fallback": 0}
SIZES: dict[str, dict[str, Any]] = {
    "large-v3": {"num_mel_bins": 128, "encoder_layers": 3, "decoder_layers": 3},
    "turbo": {"num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 1},
    "distil-small": {"encoder_layers": 3, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 96},
}  # fmt: skip


@contextmanager
def serving(path: str) -> Iterator[SoundServer]:
    made = SoundServer(path)
    try:
        yield made
    finally:
        made.close()


def text_of(path: str, prompt: list[int], timed: bool) -> str:
    tokens = whisper.greedy(path, whisper.features(path, ONE), prompt, whisper.TEXT_LENGTH - len(prompt), timed)  # fmt: skip
    return "".join(LETTERS[token] for token in tokens if token < END).replace("Ġ", " ").strip()


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, tmp_path: Path) -> None:
    path = whisper.make_whisper(tmp_path, **SIZES[size])
    with serving(path) as server:
        found = server.json(wav(ONE), language="en", response_format="verbose_json", **GREEDY)
        assert found["text"] == text_of(path, whisper.prefix(), True)
        assert len(found["text"]) > 5
        plain = server.json(wav(ONE), language="en", **GREEDY)
        assert plain["text"] == text_of(path, whisper.prefix(timestamps=False), False)


@pytest.mark.slow
def test_a_model_that_writes_english_only(tmp_path: Path) -> None:
    """Its prompt has neither language nor task."""
    path = whisper.make_whisper(tmp_path)
    file = tmp_path / "generation_config.json"
    says = {key: value for key, value in whisper.GENERATION.items() if key not in ("lang_to_id", "task_to_id")}  # fmt: skip
    file.write_text(json.dumps(says | {"is_multilingual": False}))
    with serving(path) as server:
        for fields in ({}, {"language": "en"}, {"language": "English"}):
            found = server.json(wav(ONE), **fields, **GREEDY)
            assert found["text"] == text_of(path, [START, ID["<|notimestamps|>"]], False)
        found = server.json(wav(ONE), response_format="verbose_json", **GREEDY)
        assert found["text"] == text_of(path, [START], True)
        assert found["language"] == "english"
        assert server.refused(wav(ONE), language="de") == ("`language`: this model writes English only, not 'de'", "language")  # fmt: skip
        answer = server.ask(wav(ONE), TRANSLATIONS)
        assert (answer.status_code, "English only" in answer.text) == (400, True), answer.text
