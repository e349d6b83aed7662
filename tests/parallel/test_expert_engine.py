"""Engines whose ranks share experts, or the heads of recurrent layers: the same tokens, bit for bit, as in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import engine, make_checkpoint

from quire import LLM
from quire.protocol.sampling_params import SamplingParams
from tests.models.recurrent_cases import NET
from tests.parallel.process_engine import outcomes
from tests.parallel.thread_engine import split_engine
from tests.speculation.test_speculation import answers

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
        before = seats(one)
        assert answers(one) == expected
        assert one.stats()["preemptions"]
        assert (seats(one) != before) == (how == MOVING)


def seats(one: Any) -> list[Any]:
    """Where the experts of each layer are. With bfloat16 the kernels run whole steps."""
    worker = one.client.core.executor.workers[0]
    assert (worker.fast_step.model is not None) == (worker.model.dtype == torch.bfloat16)
    layers = worker.model.model.layers
    return [getattr(layer.mlp.experts.split, "where", None) for layer in layers]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_stages_and_experts(mixture: tuple[str, str, list[Any]], size: int) -> None:
    path, dtype, expected = mixture
    with split_engine(path, size, dtype=dtype, pipeline=2, enable_expert_parallel=True) as one:
        assert answers(one) == expected


def test_recurrent_layers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also after a prefix whose state was kept."""
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


FACTS = """
class KernelFacts:
    def runs_whole_steps(self):
        return self.fast_step.model is not None
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_text"])
def test_processes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole experts that move, and delta nets, whose layers are fused in each rank's process."""
    (tmp_path / "kernel_facts.py").write_text(FACTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    rope = {**NET["rope_parameters"], "partial_rotary_factor": 0.5}
    net = {**NET, **sizes, "num_hidden_layers": 3, "rope_parameters": rope}
    experts = {**sizes, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    path = make_checkpoint(kind, tmp_path, **(experts if kind == "qwen3_moe" else net))
    moving = {**MOVING, "tensor_parallel_size": 2} if kind == "qwen3_moe" else {}
    texts: Any = [{"prompt_token_ids": [*range(3, 3 + length)]} for length in (40, 7, 90)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, logprobs=3, prompt_logprobs=1)
    found = []
    for how in ({}, {"tensor_parallel_size": 2, **moving}):
        settings: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, **how}
        settings["worker_extension_cls"] = "kernel_facts.KernelFacts"
        with LLM(path, max_model_len=256, max_num_batched_tokens=32, **settings) as llm:
            assert llm.collective_rpc("runs_whole_steps") == [True] * (1 + bool(how))
            found.append(outcomes(llm.generate(texts, params)))
    assert found[0] == found[1]
