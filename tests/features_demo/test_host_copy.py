"""A feature keeps copies of blocks on the host: requests that load them have the same tokens as if they computed them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from parallel.thread_engine import split_engine

HERE = Path(__file__).parent
SIZES = {"head_dim": 32, "intermediate_size": 128, "tie_word_embeddings": False}
ASKED = [[9, 8, 7] * 6 + prompt for prompt in prompts(6, longest=40)]
COUNT = 12


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a model beside which the feature is on, installed."""
    described = tmp_path / "host_copy_feature-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: host-copy\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[quire.features]\nhost_copy = host_copy_feature:HostCopyFeature\n"
    )
    for folder in (HERE, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(tmp_path)]))
    (tmp_path / "host_copy").mkdir()
    return make_checkpoint("qwen3", tmp_path / "main", **SIZES)


def spoil(one: Engine) -> None:
    """Forget the cached blocks, and overwrite them."""
    scheduler = one.client.core.scheduler
    assert scheduler.kv.reset()
    for model in one.client.core.executor.worker.models:
        for layer in model.attention_layers():
            for part in layer.spec.cache:
                part.fill_(torch.nan)


def loaded(one: Engine) -> float:
    return one.client.core.counts["host_copy_loaded"]


def run(one: Engine) -> list[list[int]]:
    """The tokens; afterwards all copies are made."""
    tokens = one.tokens(ASKED, greedy(COUNT))
    while one.client.core.scheduler.held_blocks:
        one.client.core.step()
    return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loaded_blocks_give_the_same_tokens(path: str, depth: int, dtype: str) -> None:
    with engine(path, depth, dtype=dtype, skip_tokenizer_init=True, block_size=16) as one:
        plain = run(one)
        assert loaded(one) == 0
        for number in (1, 2):
            spoil(one)
            assert run(one) == plain
            assert loaded(one) >= number * 16 * len(ASKED)
        one.client.core.scheduler.check()


def test_it_sleeps_between(path: str) -> None:
    with engine(path, 2, dtype="bfloat16", skip_tokenizer_init=True, block_size=16) as one:
        plain = run(one)
        one.client.call("sleep", 1)
        one.client.call("wake_up")
        assert run(one) == plain
        assert loaded(one) >= 16 * len(ASKED)


def test_all_ranks_load_their_part(path: str) -> None:
    with split_engine(path, 2, 2, dtype="bfloat16", skip_tokenizer_init=True, block_size=16) as one:
        plain = run(one)
        one.client.core.scheduler.kv.reset()
        assert run(one) == plain
        assert loaded(one) >= 16 * len(ASKED)
