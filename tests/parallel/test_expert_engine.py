"""Engines whose ranks share experts, or the heads of recurrent layers: the same tokens, bit for bit, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
from equality.engines import engine, make_checkpoint

from tests.equality.test_speculation import answers
from tests.models.recurrent_cases import NET
from tests.parallel.thread_engine import split_engine

SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
FEW_BLOCKS = {"num_gpu_blocks_override": 18, "block_size": 16, "max_num_batched_tokens": 24}
MOVING = {
    "enable_expert_parallel": True, "enable_eplb": True,
    "eplb_config": {"step_interval": 4, "window_size": 4, "num_redundant_experts": 2},
}  # fmt: skip


@pytest.fixture(
    scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)
def mixture(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, list[Any]]:
    """A checkpoint, a dtype, and the answers of one process."""
    sizes = {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32}
    path = make_checkpoint("mixtral", tmp_path_factory.mktemp("mixture"), **sizes)
    with engine(path, dtype=request.param) as one:
        return path, request.param, answers(one)


@pytest.mark.parametrize("how", [{}, MOVING], ids=["cut", "moving"])
def test_experts(mixture: tuple[str, str, list[Any]], how: dict[str, Any]) -> None:
    """With chunks, preemption, and experts that move every four steps."""
    path, dtype, expected = mixture
    with split_engine(path, dtype=dtype, **how, **FEW_BLOCKS) as one:
        assert answers(one) == expected
        assert one.stats()["preemptions"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_stages_and_experts(mixture: tuple[str, str, list[Any]], size: int) -> None:
    path, dtype, expected = mixture
    with split_engine(path, size, dtype=dtype, pipeline=2, enable_expert_parallel=True) as one:
        assert answers(one) == expected


def test_recurrent_layers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also behind a prefix whose state was kept."""
    sizes = {
        **NET,
        **SIZES,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    path = make_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("net"), **sizes)
    with engine(path) as one:
        expected = answers(one)
    with split_engine(path, block_size=16, mamba_block_size=16) as one:
        assert [answers(one), answers(one)] == [expected, expected]


@pytest.mark.slow
def test_a_model_without_attention(tmp_path_factory: pytest.TempPathFactory) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 16}
    path = make_checkpoint("mamba", tmp_path_factory.mktemp("mamba"), **sizes)
    with engine(path) as one:
        expected = answers(one)
    with split_engine(path, max_num_batched_tokens=24) as one:
        assert answers(one) == expected
