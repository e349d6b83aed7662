"""Vectors and scores of the engine: those of sentence-transformers and Transformers, and its own bits in every company."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equality.engines import engine, prompts
from equality.pooling_models import make_pooling_checkpoint, run, text
from equality.sentence_directories import CASES

from quire.protocol.pooling_params import PoolingParams

GIVEN = [[*prompt, 7] for prompt in prompts(6, longest=50)]
EMBED = PoolingParams(task="embed", skip_reading_prefix_cache=True)
Saved = Callable[[str], str]


def classified(auto: str = "AutoModelForSequenceClassification", **more: Any) -> dict[str, Any]:
    return {"auto": auto, "pad_token_id": 0, **more}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pooling_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3_model"))[0]


@pytest.fixture(scope="module")
def bert_pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert_pairs")
    return make_pooling_checkpoint("bert", folder, **classified(num_labels=1))[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, qwen3: str, bert_pairs: str) -> Path:
    """The directories of `sentence_directories.py`, and its numbers."""
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    into = tmp_path_factory.mktemp("sentences")
    program = Path(__file__).with_name("sentence_directories.py")
    texts = json.dumps([text(prompt) for prompt in GIVEN])
    command = [sys.executable, str(program), qwen3, bert_pairs, str(into)]
    done = subprocess.run(command, input=texts, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return into


def close(found: list[np.ndarray], expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, np.asarray(other), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_sentence_transformers(name: str, saved: Path) -> None:
    after = CASES[name][1]
    expected = np.load(saved / f"{name}.npy")
    with engine(str(saved / name), max_model_len=None) as one:
        info = one.client.ready.pooling
        assert info is not None
        assert (one.client.ready.max_model_len, info.num_dimensions) == (60, expected.shape[1])
        assert (info.tasks, info.prompts["query"]) == (["embed", "token_embed"], "w5 w6")
        assert info.normalizes == (after[-1:] == ("normalize",))
        assert info.cached_tasks == (["embed"] if CASES[name][0] == "lasttoken" else [])
        found = run(one, GIVEN, EMBED)
        close(found, expected)
        if info.normalizes:
            raw = PoolingParams(task="embed", use_activation=False, skip_reading_prefix_cache=True)
            for unit, whole in zip(found, run(one, GIVEN, raw), strict=True):
                assert np.linalg.norm(whole) != pytest.approx(1, abs=1e-3)
                np.testing.assert_allclose(whole / np.linalg.norm(whole), unit, atol=1e-6)


def test_scores_are_those_of_a_cross_encoder(saved: Path) -> None:
    expected = np.load(saved / "cross.npy")
    with engine(str(saved / "cross")) as one:
        info = one.client.ready.pooling
        assert info is not None
        assert (info.tasks[0], info.num_labels) == ("classify", 1)
        pairs = list(zip(GIVEN, reversed(GIVEN), strict=True))
        # the tokenizer of these tests puts no separators, and all token types are 0
        found = run(one, [a + b for a, b in pairs], PoolingParams(task="classify"))
        close(found, expected[:, None])


HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "AutoModelForSequenceClassification", {"num_labels": 5}),
    "llama tokens": ("llama", "AutoModelForTokenClassification", {"num_labels": 3}),
    "bert": ("bert", "AutoModelForSequenceClassification", {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "bert tokens": ("bert", "AutoModelForTokenClassification", {"num_labels": 4}),
    "xlm-roberta": ("xlm-roberta", "AutoModelForSequenceClassification", {"num_labels": 2}),
    "distilbert": ("distilbert", "AutoModelForSequenceClassification", {"num_labels": 2, "dim": 64, "hidden_dim": 96, "n_heads": 4, "n_layers": 2}),
    "mpnet": ("mpnet", "AutoModelForSequenceClassification", {"num_labels": 2}),
    "modernbert": ("modernbert", "AutoModelForSequenceClassification", {"num_labels": 3, "classifier_pooling": "mean", "problem_type": "regression"}),
    "modernbert tokens": ("modernbert", "AutoModelForTokenClassification", {"num_labels": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, auto, more = HEADS[name]
    path, model = make_pooling_checkpoint(kind, tmp_path, auto, **more)
    task = "token_classify" if "Token" in auto else "classify"
    params = PoolingParams(task=task, skip_reading_prefix_cache=True)
    given = [prompt for prompt in GIVEN if len(prompt) > 1]
    with torch.inference_mode(), engine(path) as one:
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in given]
        how = {"multi_label_classification": torch.sigmoid, "regression": lambda x: x}
        act = how.get(str(more.get("problem_type")), lambda x: x.softmax(-1))
        assert one.client.resolved.pooling is not None
        assert one.client.resolved.pooling.info.tasks[0] == task
        close(run(one, given, params), [act(each) for each in logits])
        raw = PoolingParams(task=task, use_activation=False, skip_reading_prefix_cache=True)
        close(run(one, given, raw), logits)
