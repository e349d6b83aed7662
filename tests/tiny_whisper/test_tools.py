"""The tools that make quire-tiny-whisper: the spectrogram is Quire's, windows say what they contain, a run is published as Transformers reads it."""

from __future__ import annotations

import hashlib
import json
import random
from argparse import Namespace
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from quire.frontend.media.log_mel import log_mel
from tools.tiny_whisper import network, sentences, synthesize, train, voices
from tools.tiny_whisper import tokenizer as vocabulary
from tools.tiny_whisper.accuracy import Accuracy, edits, greedy_texts
from tools.tiny_whisper.export import export
from tools.tiny_whisper.noise import hum_and_clicks, in_a_room
from tools.tiny_whisper.spectrogram import MELS, masked, spectrograms
from tools.tiny_whisper.synthesize import Spoken
from tools.tiny_whisper.windows import IGNORED, SAMPLES, Window, Windows

SMALL = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_layers": 2,
    "decoder_attention_heads": 2, "decoder_ffn_dim": 24,
}  # fmt: skip


def tone(seconds: float, text: str) -> Spoken:
    """A tone in place of speech; its words are equally long, and each is one phoneme, of the number of the word."""
    count, words = int(seconds * 16_000), len(text.split())
    samples = 12_000 * np.sin(np.arange(count) * 0.2)
    starts = np.arange(words) * count // words
    phonemes = np.stack([starts, np.arange(words) + 1], 1)
    return Spoken(text, samples.astype(np.int16), "tone", starts, phonemes)


PHRASES = [tone(0.6, "seven red cats"), tone(1.1, "stop the music"), tone(0.3, "nine")]


@pytest.fixture(scope="module")
def tokens() -> Tokenizer:
    return vocabulary.train()


@pytest.fixture(scope="module")
def drawn(tokens: Tokenizer) -> list[Window]:
    windows = Windows(PHRASES, tokens, 3)
    return [windows.take() for _ in range(200)]


def test_the_spectrogram_is_that_of_the_server(drawn: list[Window]):
    some = [one.samples_N for one in drawn[:4]]
    want = np.stack([log_mel(one, MELS, 500) for one in some])
    found = spectrograms(some, SAMPLES)
    assert found.shape == want.shape
    assert np.abs(found.numpy() - want).max() < 1e-3
    hidden = masked(found, torch.Generator().manual_seed(1))
    assert 0.02 < float((hidden != found).float().mean()) < 0.5


def test_each_word_is_one_token_and_any_text_survives(tokens: Tokenizer):
    assert all(len(tokens.encode(f" {word}").ids) == 1 for word in sentences.WORDS)
    for text in ("héllo 漢字", " seven red cats", "<|en|>"):
        assert tokens.decode(tokens.encode(text).ids, skip_special_tokens=False) == text
    names = [tokens.token_to_id(name) for name in (*vocabulary.SPECIAL, *vocabulary.TIMES)]
    assert names == list(range(names[0], tokens.get_vocab_size()))


def test_a_window_has_the_tokens_of_its_phrases(drawn: list[Window], tokens: Tokenizer):
    start = tokens.token_to_id(vocabulary.START)
    for one in drawn:
        first = one.tokens.index(start)
        assert one.labels[:first] == [IGNORED] * first
        assert one.labels[first + 1 : -1] == one.tokens[first + 2 :]
        said = [token for token in one.labels[first:] if token < tokens.token_to_id(vocabulary.END)]
        assert tokens.decode(said).strip() == one.text
        assert len(one.tokens) <= network.TEXT_LENGTH
        assert 0 < len(one.samples_N) <= SAMPLES
    kinds = {tokens.id_to_token(one.labels[one.tokens.index(start)]) for one in drawn}
    assert kinds == {vocabulary.ENGLISH, vocabulary.NO_SPEECH}
    assert len({" ".join(one.text.split()) for one in drawn}) > len(PHRASES) + 1, "none has two phrases"  # fmt: skip


def test_timestamps_are_where_the_sound_is(tokens: Tokenizer):
    windows = Windows(PHRASES, tokens, 5)
    first = tokens.token_to_id(vocabulary.TIMES[0])
    seen = 0
    for _ in range(30):
        one = windows.window(PHRASES[:1])
        times = [(token - first) / 50 for token in one.tokens if token >= first]
        if not times:
            continue
        seen += 1
        begin, end = times
        assert end - begin == pytest.approx(0.6, abs=0.021)
        inside = np.abs(one.samples_N[int(begin * 16_000) : int(end * 16_000)]).mean()
        outside = np.abs(one.samples_N[: max(0, int(begin * 16_000) - 320)])
        assert not len(outside) or inside > 1.2 * outside.mean()
    assert seen > 5


def test_the_helpers_know_when_each_word_is_said(tokens: Tokenizer):
    windows = Windows(PHRASES, tokens, 5)
    end = tokens.token_to_id(vocabulary.END)
    for chosen in (PHRASES[:1], PHRASES, []):
        one = windows.window(chosen)
        assert len(one.phonemes_S) == vocabulary.STATES
        said = [tokens.decode([one.labels[place]]).strip() for place, _, _ in one.spans]
        assert said == one.text.split()
        assert all(one.labels[place] < end for place, _, _ in one.spans)
        numbers = [number for phrase in chosen for number in range(1, len(phrase.text.split()) + 1)]
        for (_, first, last), number in zip(one.spans, numbers, strict=True):
            inside = one.phonemes_S[first + 1 : last - 1]
            assert len(inside) > 3
            assert set(inside) == {number}
        assert (one.phonemes_S > 0).sum() == pytest.approx(sum(len(phrase.samples_N) for phrase in chosen) / 320, abs=3)  # fmt: skip


def test_noise_is_as_loud_as_it_says():
    speech = np.zeros(16_000, np.float32)
    heard = in_a_room(speech, 0.01, random.Random(1), held_out=True)
    assert 0 < np.abs(heard).max() <= 1
    assert np.mean(hum_and_clicks(1) ** 2) == pytest.approx(1, rel=1e-3)
    assert not np.array_equal(hum_and_clicks(1), hum_and_clicks(2))


@pytest.mark.parametrize(
    ("said", "heard", "count"),
    [("a b c", "a b c", 0), ("a b c", "a c", 1), ("a", "b a c", 2), ("a b", "", 2), ("a b", "b a", 2), ("a b c d", "a x c", 2)],
)  # fmt: skip
def test_edits(said: str, heard: str, count: int):
    assert edits(said.split(), heard.split()) == count
    assert edits(heard.split(), said.split()) == count


def test_accuracy_counts_words_and_texts():
    found = Accuracy()
    found.add("one two three", "one two three")
    found.add("one two", "one six")
    assert (found.of_words, found.of_texts) == (0.8, 0.5)
    assert found.wrong == [("one two", "one six")]


def test_what_is_held_out_is_not_trained_on():
    assert not set(voices.VARIANTS) & set(voices.OTHER_VARIANTS)
    assert not set(voices.SPEEDS) & set(voices.OTHER_SPEEDS)
    assert "" in voices.VARIANTS


@pytest.mark.skipif(find_library("espeak-ng") is None, reason="espeak-ng is not installed")
def test_synthesized_phrases(tmp_path: Path):
    for held_out in (False, True):
        found = synthesize.spoken(4, held_out)
        some = [next(found) for _ in range(12)]
        assert all(sentences.is_held_out(one.text) == held_out for one in some)
        assert all(1600 < len(one.samples_N) <= 4.8 * 16_000 for one in some)
        assert all(np.abs(one.samples_N).max() > 1000 for one in some)
        for one in some:
            assert len(one.words_W) == len(one.text.split())
            assert sorted(one.words_W) == list(one.words_W)
            assert one.words_W[-1] < len(one.samples_N)
            assert (one.phonemes_P2[:, 1] > 0).sum() >= len(one.words_W)
    synthesize.write(tmp_path, 0, some)
    again = synthesize.read(tmp_path)
    assert [one.text for one in again] == [one.text for one in some]
    for a, b in zip(again, some, strict=True):
        for name in ("samples_N", "words_W", "phonemes_P2"):
            assert np.array_equal(getattr(a, name), getattr(b, name))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, network in float32) of a run of three steps, which was stopped after two."""
    folder: Path = tmp_path_factory.mktemp("whisper")
    (folder / "phrases").mkdir()
    synthesize.write(folder / "phrases", 0, PHRASES)
    asked = Namespace(
        run=folder / "run", phrases=folder / "phrases", held_out=folder / "phrases", measured=2, shape=json.dumps(SMALL),
        steps=2, decay=0.4, batch=3, matrix_rate=0.02, other_rate=2e-3, seed=1, save=1, measure=2, threads=1, dtype="float32",
    )  # fmt: skip
    threads = torch.get_num_threads()
    try:
        train.main(asked)
        asked.steps = 3
        train.main(asked)
    finally:
        torch.set_num_threads(threads)
    state = torch.load(asked.run / "state.pt", weights_only=True)
    assert state["optimizer"]["steps"] == 3
    assert state["windows"] == 9
    export(asked.run, folder / "out")
    model = WhisperForConditionalGeneration.from_pretrained(folder / "out", dtype=torch.float32)
    return folder, model.eval()


def test_a_published_run_is_the_average_of_its_weights(published: tuple[Path, Any]):
    folder, model = published
    average = torch.load(folder / "run" / "state.pt", weights_only=True)["optimizer"]["average"]
    weights = dict(model.named_parameters())
    assert {name.removeprefix("whisper.") for name in average if not name.startswith("phonemes.")} == set(weights)  # fmt: skip
    for name, weight in weights.items():
        assert torch.equal(weight, average[f"whisper.{name}"].bfloat16().float())
    first = hashlib.sha256((folder / "out" / "model.safetensors").read_bytes())
    export(folder / "run", folder / "again")
    assert first.digest() == hashlib.sha256((folder / "again" / "model.safetensors").read_bytes()).digest()  # fmt: skip


def test_transformers_reads_what_is_published(published: tuple[Path, Any], tokens: Tokenizer):
    """Its processor has the server's spectrogram, and its `generate` the texts that training measures."""
    folder, model = published
    processor = WhisperProcessor.from_pretrained(folder / "out")
    sound = PHRASES[1].samples_N.astype(np.float32) / 32768
    inputs = processor(sound, sampling_rate=16_000, return_tensors="pt")
    assert np.abs(inputs.input_features[0].numpy() - log_mel(sound, MELS, 500)).max() < 1e-3
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": 16}
    found = model.generate(inputs.input_features, language="en", task="transcribe", **options)
    ends = model.generate(inputs.input_features, return_timestamps=True, **options)
    assert found.shape[1] > 1
    assert int(ends[0, 0]) in range(tokens.get_vocab_size())
    (text,) = greedy_texts(model, tokens, [sound])
    assert isinstance(text, str)
