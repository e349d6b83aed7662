"""The memory of adapters is planned by true ranks, and what is planned is what they take."""

from __future__ import annotations

from pathlib import Path

import pytest
from equality.engines import make_checkpoint
from lora.adapters import lora_engine, planned, write

from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import NotEnoughMemory

KEYWORDS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "enable_lora": True}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # gpt2 runs through Transformers
def test_planned_bytes_are_those_of_true_ranks(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path / "model")
    rank_one = 3 * (128 + 96 + 96 + 128 + 160 + 160 + 160) * 4
    if kind == "gpt2":
        rank_one = (
            3 * ((64 + 192) + (64 + 64) + 2 * (64 + 256)) * 4 + (512 + 64) * 4
        )  # positions look like a matrix
    asked = dict(KEYWORDS, max_loras=2, max_cpu_loras=3, max_lora_rank=16)
    resolved = resolve_config(EngineConfig.from_keywords(model=path, **asked))
    plan = planned(resolved)
    assert plan.num_line_bytes == 3 * 16 * rank_one
    name, about = plan.table()[3]
    assert (name, about.partition(" for ")[2]) == ("adapters", "3 to come of max_lora_rank=16")
    without = resolve_config(
        EngineConfig.from_keywords(model=path, **asked | {"enable_lora": False})
    )
    assert not planned(without).num_line_bytes


def test_configured_adapters_count_with_their_own_ranks(tmp_path: Path) -> None:
    path, two = make_checkpoint("llama", tmp_path / "model"), write(tmp_path / "two", 2)
    rank_one = 3 * (128 + 96 + 96 + 128 + 160 + 160 + 160) * 4
    modules = [{"name": "two", "path": two, "base_model_name": None}]
    asked = {"max_cpu_loras": 3, "max_lora_rank": 16, "lora_modules": modules}
    plan = planned(resolve_config(EngineConfig.from_keywords(model=path, **KEYWORDS, **asked)))
    assert plan.num_line_bytes == (2 + 16 + 16) * rank_one
    (line,) = plan.lines
    assert line.about == "for 1 of the configuration and 2 to come of max_lora_rank=16"
    with lora_engine(path, **asked) as one:
        (card,) = one.client.call("list_loras")
        assert 2 * rank_one <= card["bytes"] < 2 * rank_one + 1024  # with scales
    chosen = {"lora_target_modules": ["q_proj"]}
    plan = planned(resolve_config(EngineConfig.from_keywords(model=path, **KEYWORDS, **chosen)))
    assert plan.num_line_bytes == 16 * 3 * 128 * 4


def test_adapters_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    asked = {"max_cpu_loras": 100_000_000, "max_lora_rank": 512}
    with pytest.raises(NotEnoughMemory, match=r"of adapters.*max_cpu_loras or max_lora_rank"):
        planned(resolve_config(EngineConfig.from_keywords(model=path, **KEYWORDS, **asked)))
