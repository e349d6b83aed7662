"""Llama 4 beyond its chunks, against Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from tests.models.cases import LLAMA4, MOE, Case, write
from tests.models.harness import Runner
from tests.models.test_native import CLOSE, build, in_pieces, plain, texts

CHUNK = 32
CASE = Case("llama4", "llama4_text", {**MOE, **LLAMA4, "attention_chunk_size": CHUNK})


def test_texts_of_several_chunks(tmp_path: Path) -> None:
    """Whole, and in pieces that end before, at and after the end of a chunk: the same bits."""
    theirs = write(CASE, tmp_path)
    ours = build(tmp_path, model_impl="quire")
    assert not ours.capturable
    long = texts()[0]
    found = [[*long, *reversed(long)], long[:CHUNK], long[: CHUNK + 1]]
    whole = [Runner(ours).prefill(0, text) for text in found]
    for got, text in zip(whole, found, strict=True):
        assert (got - plain(theirs, text)).abs().max() < CLOSE
    for block_size, most in ((16, 5), (32, 40), (8, 70)):
        runner = Runner(ours, block_size=block_size, num_tokens=768, seed=block_size)
        pieces = in_pieces(runner, found, seed=block_size, most=most)
        for got, alone in zip(pieces, whole, strict=True):
            assert torch.equal(got, alone)
    with pytest.raises(ConfigError, match=r"block_size=64 does not divide .* chunks of 32"):
        Runner(ours, block_size=64)


def test_requests_within_a_chunk_have_no_window(tmp_path: Path) -> None:
    write(CASE, tmp_path)
    ours = build(tmp_path, model_impl="quire", max_model_len=CHUNK)
    assert ours.capturable
    assert {layer.spec.window for layer in ours.attention_layers()} == {None}
    Runner(ours, block_size=64)
