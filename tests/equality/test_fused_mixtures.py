"""Mixture layers in the fused path: the tokens of their modules, and a whole step in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import engine, greedy, make_checkpoint, prompts

from quire.ops.cpu.bindings import best
from quire.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")

EXPERTS = {
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 32},
    "qwen2_moe": {"num_attention_heads": 2},
    "mixtral": {"head_dim": 32},
    "glm4_moe": {
        "head_dim": 64,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "use_qk_norm": True,
    },
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("qwen3_moe", None), ("qwen3_moe", "int8"), ("qwen3_moe", "int4_g32"), ("qwen2_moe", None), ("mixtral", "int8"), ("glm4_moe", None)],
)  # fmt: skip
def test_a_step_in_one_call_draws_the_tokens_of_modules(
    kind: str, quantization: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    path = make_checkpoint(kind, tmp_path, **{**EXPERTS, **KINDS[kind]})
    drawn = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
    settings = {"dtype": "bfloat16", "quantization": quantization, "max_num_batched_tokens": 50}
    found = []
    for way in ("step", "layers", "modules"):
        with engine(path, **settings) as one:
            worker: Any = one.client.core.executor.worker  # type: ignore[attr-defined]
            assert worker.fast_step.model is not None
            if way != "step":
                worker.fast_step.accepts_fast_step = lambda plan: False
            if way == "modules":
                worker.unfuse("test")
            assert (worker.model.model.layers.fused is None) == (way == "modules")
            found.append((one.tokens(prompts(5), greedy(12)), one.tokens(prompts(5), drawn)))
    assert found[0] == found[1] == found[2]
