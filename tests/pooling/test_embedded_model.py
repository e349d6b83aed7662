"""The embedded models as pooling models: the program of docs/pooling.md, stories found, vectors that do not depend on company."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from quire import LLM
from tools.tiny_model import paraphrases

PAGE = Path(__file__).parents[2] / "docs" / "pooling.md"
TEXTS = ["The cat sat on the mat.", "Tom has three apples.", "Once upon a time, there was a fox.", "a"]  # fmt: skip


def test_the_program_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(block, "pooling.md", "exec", dont_inherit=True), {})
    printed = capsys.readouterr().out.split()
    assert printed[:2] == ["128", "128"]
    assert all(-1 <= float(score) <= 1 for score in printed[2:])


def test_vectors_do_not_depend_on_company() -> None:
    with LLM("quire-tiny", runner="pooling", kv_cache_memory_bytes="16M", max_num_seqs=3) as llm:
        together = [one.outputs.embedding for one in llm.embed(TEXTS * 3, use_tqdm=False)]
        assert together == together[:4] * 3
        for text, vector in zip(TEXTS, together, strict=False):
            assert llm.embed(text, use_tqdm=False)[0].outputs.embedding == vector
            assert sum(number * number for number in vector) == pytest.approx(1, abs=1e-5)
        scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        assert scores[0].outputs.score == pytest.approx(1, abs=1e-5)


def test_the_embedder_finds_stories_told_in_other_words() -> None:
    told = paraphrases.pairs(1, 200, published=True)
    with LLM("quire-tiny-embed") as llm:
        outputs = llm.embed([text for pair in told for text in pair], use_tqdm=False)
    vectors = np.array([one.outputs.embedding for one in outputs])
    nearest = (vectors[::2] @ vectors[1::2].T).argmax(1)
    assert (nearest == np.arange(200)).mean() >= 0.9
