"""An engine whose layers are in several processes: the same answers as in one process; and what happens when a stage ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import LLM
from quire.errors import ConfigError, Unsupported
from tests.parallel.process_engine import (
    MODEL,
    SETTINGS,
    answers,
    answers_with,
    end_rank,
    expected,
)


@pytest.fixture(scope="module")
def staged() -> Iterator[LLM]:
    with LLM(MODEL, **SETTINGS, dtype="bfloat16", pipeline_parallel_size=2) as llm:
        yield llm


def test_answers_are_those_of_one_process(staged: LLM) -> None:
    assert answers(staged) == expected("bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("stages", "tensor", "partition"), [(2, 1, "1,4"), (3, 1, None), (2, 2, None), (2, 2, "4,1")]
)
def test_other_layouts(
    dtype: str, stages: int, tensor: int, partition: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(dtype)
    if partition is not None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor}
    assert answers_with(dtype=dtype, **sizes) == wanted


def test_a_stage_that_ends_ends_all(staged: LLM) -> None:
    """The last of this engine."""
    end_rank(staged, 0)


def test_what_cannot_be_split_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=9 is more than the \d layers"):
        LLM(MODEL, pipeline_parallel_size=9)
    heads = {"method": "eagle3", "num_speculative_tokens": 2}
    with pytest.raises(Unsupported, match=r"method=eagle3 with pipeline_parallel_size=2"):
        LLM(MODEL, pipeline_parallel_size=2, speculative_config=heads)
    monkeypatch.setenv("QUIRE_PP_LAYER_PARTITION", "1,2,3")
    with pytest.raises(ConfigError, match=r"PARTITION=1,2,3.*needs 2 numbers of layers"):
        LLM(MODEL, pipeline_parallel_size=2)
