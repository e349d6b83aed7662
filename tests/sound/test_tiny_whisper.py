"""quire-tiny-whisper: the sample of the package, phrases of voices that it was not trained on, and the text that Transformers writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from sound_server import TRANSLATIONS, SoundServer, wav
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_whisper.accuracy import Accuracy
from tools.tiny_whisper.samples import SAMPLE
from tools.tiny_whisper.sentences import is_held_out

HERE, MODEL = Path(__file__).parent, EMBEDDED / "quire-tiny-whisper"
GREEDY = {"temperature_increment_on_fallback": 0}
RATE = 16_000


@pytest.fixture(scope="module")
def server() -> Iterator[SoundServer]:
    made = SoundServer("quire-tiny-whisper", dtype="auto")
    yield made
    made.close()


@pytest.fixture(scope="module")
def phrases() -> list[tuple[str, np.ndarray]]:
    """(text, samples) of held_out.ogg: half of them with hum and clicks."""
    samples_N, rate = soundfile.read(HERE / "held_out.ogg", dtype="float32")
    assert rate == RATE
    spans = json.loads((HERE / "held_out.json").read_text())
    return [(text, samples_N[start:end]) for start, end, text in spans]


def sample() -> bytes:
    return (MODEL / "sample.wav").read_bytes()


def test_the_sample(server: SoundServer):
    """Of a held-out voice, speed and phrase; the file begins and ends with half a second of silence."""
    assert is_held_out(SAMPLE)
    assert len(sample()) < 150_000
    found = server.json(sample())
    assert found["text"] == SAMPLE
    assert server.json(sample(), TRANSLATIONS)["text"] == SAMPLE
    assert server.json(sample(), language="en", prompt="seven red cats")["text"] == SAMPLE
    events = server.events(sample())
    assert "".join(event.get("delta", "") for event in events).strip() == SAMPLE


def test_times_of_the_sample(server: SoundServer):
    found = server.json(
        sample(), response_format="verbose_json", **{"timestamp_granularities[]": ["segment", "word"]}
    )  # fmt: skip
    assert found["language"] == "english"
    assert found["text"].strip() == SAMPLE
    (segment,) = found["segments"]
    assert segment["start"] == pytest.approx(0.5, abs=0.15)
    assert segment["end"] == pytest.approx(found["duration"] - 0.5, abs=0.15)
    assert segment["no_speech_prob"] < 0.1
    words = found["words"]
    assert [word["word"].strip() for word in words] == SAMPLE.split()
    starts = [word["start"] for word in words]
    assert starts == sorted(starts)
    assert np.diff(starts).min() > 0.05, "each word has its own time"


def test_phrases_that_were_not_trained_on(server: SoundServer, phrases: list[tuple[str, np.ndarray]]):  # fmt: skip
    """Its card measures 1,294 words, 97 % of them right; these are 111."""
    found = Accuracy()
    for text, samples_N in phrases:
        assert is_held_out(text)
        found.add(text, server.json(wav(samples_N), language="en", **GREEDY)["text"])
    assert found.texts == len(phrases) >= 24
    assert found.of_words >= 0.92, found.wrong


def test_silence_has_no_text(server: SoundServer):
    noise = 0.01 * np.random.default_rng(1).standard_normal(3 * RATE)
    for samples in (np.zeros(3 * RATE), noise):
        found = server.json(wav(samples.astype(np.float32)), response_format="verbose_json")
        assert found["text"] == ""


def test_transformers_writes_the_same(server: SoundServer, phrases: list[tuple[str, np.ndarray]]):
    """`WhisperProcessor` and `generate`, on the folder as it is."""
    processor: Any = WhisperProcessor.from_pretrained(MODEL)
    model: Any = WhisperForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    for _, samples_N in phrases[:6]:
        mel = processor(samples_N, sampling_rate=RATE, return_tensors="pt").input_features
        ids = model.generate(mel, language="en", task="transcribe", do_sample=False, num_beams=1)
        (text,) = processor.batch_decode(ids, skip_special_tokens=True)
        assert server.json(wav(samples_N), language="en", **GREEDY)["text"] == text.strip()
