"""An engine whose layers are in several processes: the same tokens as in one process; and what happens when a stage ends."""

from __future__ import annotations

import os
import signal
import time

import pytest

from quire import LLM
from quire.errors import ConfigError, EngineDeadError, Unsupported
from tests.parallel.test_tensor_parallel import GREEDY, MODEL, PROMPTS, answers


def test_tokens_and_logprobs_are_those_of_one_process() -> None:
    assert answers(dtype="bfloat16", pipeline_parallel_size=2) == answers(dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("stages", "tensor", "partition"), [(2, 1, "1,4"), (3, 1, None), (2, 2, None), (2, 2, "4,1")]
)
def test_other_layouts(
    dtype: str, stages: int, tensor: int, partition: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answers(dtype=dtype)
    if partition is not None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor}
    assert answers(dtype=dtype, **sizes) == wanted


def test_a_stage_that_ends_ends_all() -> None:
    llm = LLM(MODEL, max_model_len=256, pipeline_parallel_size=2)
    members = llm.client.core.executor.members  # type: ignore[attr-defined]
    os.kill(members[0].process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"worker's process was ended by SIG"):
        llm.generate(PROMPTS, GREEDY)
    assert time.monotonic() - began < 30
    llm.shutdown()
    assert all(member.process.poll() is not None for member in members)


def test_what_cannot_be_split_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=9 is more than the \d layers"):
        LLM(MODEL, pipeline_parallel_size=9)
    with pytest.raises(Unsupported, match=r"pipeline_parallel_size=2 with --enable-lora"):
        LLM(MODEL, pipeline_parallel_size=2, enable_lora=True)
    monkeypatch.setenv("QUIRE_PP_LAYER_PARTITION", "1,2,3")
    with pytest.raises(ConfigError, match=r"PARTITION=1,2,3.*needs 2 numbers of layers"):
        LLM(MODEL, pipeline_parallel_size=2)
