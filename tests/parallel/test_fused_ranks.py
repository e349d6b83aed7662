"""Ranks whose layers are fused: the kernels exchange, and the logits have the bits of one process, module by module."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import greedy, make_checkpoint, prompts
from torch import Tensor

from quire.attention.cpu import CpuAttention
from quire.layers.decoder_layer import QueryScale
from quire.layers.weight_slots import Layer, slots_of
from quire.layers.weights import weights_of
from quire.native.fused_decoder import fuse_model
from quire.native.model import native_model
from quire.ops.cpu.bindings import best
from quire.parallel.layout import RankLayout
from quire.parallel.rank_address import addresses
from quire.parallel.ranks import split_among
from quire.parallel.shared_memory import SharedMemoryGroup
from quire.protocol.sampling_params import SamplingParams
from quire.quantization.apply import pack_weights, quantize_weights
from tests.equality.test_fused_options import CENTERED, Family, logits
from tests.models.harness import Runner
from tests.parallel.test_exchange import joined
from tests.parallel.thread_engine import split_engine

pytestmark = [
    pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU"),
    pytest.mark.usefixtures("native_ops"),
]

# Hidden states divide into parts of 32 outputs for two ranks, not for four; all others for both.
SIZES = {
    "vocab_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"config": {"tie_word_embeddings": True}},
    "one key head": {"attention": {"head_dim": 128, "kv_heads": 1}},
    "a norm of each head": {"attention": {"qk_norm": True}},
    "a norm of all heads": {"attention": {"full_qk_norm": True}},
    "norms of all heads, a scale of queries": {
        "attention": {"full_qk_norm": True, "query_scale": QueryScale(0.7, 5, 1)}
    },
    "sinks and a window": {"attention": {"sinks": True, "window": 9}},
    "biases": {"attention": {"qkv_bias": True, "o_bias": True}},
    "a gate of the output": {"attention": {"output_gate": True, "qk_norm": True}},
    "parallel": {"layer": {"norm": CENTERED}},
    "an MLP that does not divide": {"mlp": {"width": 96}},
    "delta nets": {
        "config": {"num_hidden_layers": 3, "linear_num_value_heads": 8},
        "attention": {"output_gate": True},
    },
    "experts": {"experts": {}},
    "experts with weights of inputs": {"experts": {"on_input": True}},
}


def construct(case: str, ranks: SharedMemoryGroup | None = None) -> Family:
    options = CASES[case]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with split_among(ranks):
            return Family(case, {**options, "config": {**SIZES, **options.get("config", {})}})
    finally:
        torch.set_default_dtype(before)


def runner(model: Family, tensors: dict[str, Tensor], quantization: str | None) -> Runner:
    """The model with the tensors of a checkpoint, packed, on caches of the kernels."""
    slots = slots_of(model)
    for name, tensor in tensors.items():
        slots[name].fill(tensor.clone(), torch.device("cpu"), name)
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.join()
    if quantization is not None:
        quantize_weights(weights_of(model), quantization)
    pack_weights(weights_of(model))
    return Runner(model, backend=CpuAttention(), dtype=torch.bfloat16, num_tokens=256)


def in_one_thread(each: Runner) -> list[Tensor]:
    torch.set_num_threads(1)  # of the calling thread
    return logits(each)


def check(case: str, size: int, quantization: str | None = None) -> None:
    torch.manual_seed(3)
    tensors = {}
    for name, slot in slots_of(construct(case)).items():
        if slot.is_alternative:
            continue
        one = len(slot.shape()) == 1
        drawn = torch.randn(slot.shape()) * (0.5 if one else 0.2) + one
        tensors[name] = drawn.bfloat16()
    wanted = logits(runner(construct(case), tensors, quantization))
    assert wanted[0].std() > 0.1
    layout = RankLayout(tensor=size)
    with addresses(layout) as found, ThreadPoolExecutor(size) as threads:
        ranks = [joined(each) for each in found]
        runners = [runner(construct(case, each), tensors, quantization) for each in ranks]
        for own, each in zip(ranks, runners, strict=True):
            fuse_model(each.model)
            native = native_model(each.model)
            assert native is not None
            assert native.table_ranks == native.head.y_ranks == own.link
        for got in threads.map(in_one_thread, runners):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_fused_layers_of_ranks_have_the_bits_of_one_process(case: str) -> None:
    for size in (2, 4):
        check(case, size)


@pytest.mark.parametrize("quantization", ["int8", "int4_g32"])
def test_quantized_weights_of_ranks(quantization: str) -> None:
    check("tied", 2, quantization)


MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


WHOLE = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("kind", "more", "placed"), [("qwen3", {}, {}), ("qwen3_moe", MIXTURE, WHOLE)]
)
def test_a_step_of_ranks_is_one_call_of_the_kernels(
    kind: str, more: dict[str, Any], placed: dict[str, Any], tmp_path: Path
) -> None:
    """From tokens to drawn tokens, with the words of a tied table on both ranks, and whole experts on four."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 384, "head_dim": 64}
    path = make_checkpoint(kind, tmp_path, **sizes, **more, tie_word_embeddings=True)
    params = [greedy(9), SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)]
    found, steps = [], []
    for size, asked in ((1, {}), (2, {}), (4, placed)):
        with split_engine(path, size, dtype="bfloat16", max_num_batched_tokens=32, **asked) as one:
            executor: Any = one.client.core.executor
            workers = executor.workers if size > 1 else [executor.worker]
            for worker in workers:
                run = worker.fast_step.run
                worker.fast_step.run = lambda plan, run=run: (steps.append(plan.step), run(plan))[1]
            found.append(one.tokens(prompts(4, seed=2), params * 2))
            assert all(worker.model.model.embed_tokens.words == 384 // size for worker in workers)
    assert found[0] == found[1] == found[2]
    assert len(steps) > 7 * 9  # of all ranks
