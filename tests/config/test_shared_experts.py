"""Options that engines which share experts cannot have: refused by name, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig, Resolved
from quire.engine.resolve import resolve_config
from quire.errors import Unsupported
from quire.worker.memory_forecast import plan_memory
from tests.models.cases import CASES, write

SHARED: dict[str, Any] = {"enable_expert_parallel": True, "data_parallel_size": 2}
ELSEWHERE = "engines on several machines, or behind another load balancer"
REFUSED = [
    ({"data_parallel_rank": 1}, ELSEWHERE),
    ({"data_parallel_start_rank": 0, "data_parallel_size_local": 1}, ELSEWHERE),
    ({"data_parallel_size_local": 1}, ELSEWHERE),
    ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2}, ELSEWHERE),
    ({"data_parallel_backend": "ray"}, ELSEWHERE),
    ({"data_parallel_multi_port_external_lb": True, "data_parallel_size_local": 2}, "--data-parallel-multi-port-external-lb"),
    ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
    ({"enable_eplb": True, "tensor_parallel_size": 2}, "--enable-eplb"),
    ({"enable_lora": True}, "--enable-lora"),
]  # fmt: skip


def settle(folder: Path, kind: str = "mixtral", **keywords: Any) -> Resolved:
    write(next(case for case in CASES if case.name == kind), folder)
    return resolve_config(EngineConfig.from_keywords(model=str(folder), **keywords))


@pytest.mark.parametrize(("more", "what"), REFUSED)
def test_refusals(more: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as why:
        settle(tmp_path, **SHARED, **more)
    said = str(why.value)
    assert f"enable_expert_parallel and data_parallel_size=2 with {what} is not supported yet" in said  # fmt: skip
    assert "leave --enable-expert-parallel out: then each engine has all experts" in said
    settle(tmp_path, data_parallel_size=2, **{k: v for k, v in more.items() if k != "enable_eplb"})
    settle(tmp_path, **SHARED)


def test_a_model_without_experts_is_served_by_whole_engines(tmp_path: Path) -> None:
    settle(tmp_path, "llama", **SHARED, data_parallel_rank=1)


def test_the_memory_plan_counts_an_engines_experts(tmp_path: Path) -> None:
    whole, half = (
        plan_memory(settle(tmp_path, data_parallel_size=2, kv_cache_memory_bytes=1 << 22, **more)).weights
        for more in ({}, {"enable_expert_parallel": True})
    )  # fmt: skip
    assert 0.3 * whole < half < 0.95 * whole
