"""Experts that ranks share: the same logits with the same bits, however the experts are distributed, and on whichever rank they are later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.config.parallel.experts import EplbOptions
from quire.features.expert_balance.hook import ExpertBalanceHook
from quire.layers.expert_parallel import CutExperts, PlacedExperts
from quire.layers.moe import Experts, Router
from tests.models.cases import CASES, Case, write
from tests.models.harness import Runner
from tests.models.test_native import build, texts
from tests.parallel.thread_ranks import ThreadRanks, check_bits, load_on, on_ranks

EVERY = {case.name: case for case in CASES}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
SHORT = texts(lengths=(21, 3))
PLACED = {"enable_expert_parallel": True, "tensor_parallel_size": 2}


def written(name: str, folder: Path, **config: Any) -> Case:
    case = EVERY[name]
    changed = {**WIDE, **case.config, **config}
    if "moe_intermediate_size" in case.config:
        changed["moe_intermediate_size"] = 128
    case = replace(case, config=changed)
    write(case, folder)
    return case


def logits(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [Runner(model, dtype=dtype).prefill(0, text) for text in SHORT]


def experts_of(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def check(folder: Path, kind: type, sizes: tuple[int, ...], **asked: Any) -> None:
    """The bits of one process on all ranks, whose experts are shared as `kind`."""
    asked = {"model_impl": "quire", **asked}
    dtype = getattr(torch, asked.get("dtype", "float32"))
    plain = {key: value for key, value in asked.items() if key not in PLACED}
    wanted = logits(build(folder, **plain), dtype)

    def run(ranks: ThreadRanks) -> list[Tensor]:
        model = load_on(ranks, lambda: build(folder, **asked))
        assert {type(layer.split) for layer in experts_of(model)} == {kind}
        return logits(model, dtype)

    check_bits(sizes, run, wanted)


CUT = ["mixtral", "gpt-oss"]
SLOW = ["llama4 top two", "qwen2 moe", "gemma4 moe", "glm4 moe in groups", "ernie4_5 moe", "phimoe"]
SLOW += ["qwen3 moe", "granite moe", "deepseek v3", "llama4"]
NAMES = [*CUT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_has_a_part_of_every_expert(name: str, tmp_path: Path) -> None:
    written(name, tmp_path, **({"intermediate_size": 128} if name != "deepseek v3" else {}))
    check(tmp_path, CutExperts, (2, 4))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("mixtral", "round_robin"), ("gpt-oss", "linear")),
        *(pytest.param("llama4 top two", how, marks=pytest.mark.slow) for how in ("linear", "round_robin")),
    ],
)  # fmt: skip
def test_each_rank_has_whole_experts(name: str, strategy: str, tmp_path: Path) -> None:
    """5 experts on 2 and on 4 ranks, in tensors for each and in one for all."""
    written(name, tmp_path, num_local_experts=5, num_experts=5)
    check(tmp_path, PlacedExperts, (2, 4), expert_placement_strategy=strategy, **PLACED)


@pytest.mark.parametrize("form", ["bf16", "int8", pytest.param("int4_g32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [CutExperts, PlacedExperts])
def test_experts_in_the_forms_of_the_kernels(form: str, kind: type, tmp_path: Path) -> None:
    written("mixtral", tmp_path, num_local_experts=5)
    quantization = {} if form == "bf16" else {"quantization": form}
    placed = PLACED if kind is PlacedExperts else {}
    check(tmp_path, kind, (2,), dtype="bfloat16", **quantization, **placed)


def test_a_rank_without_tokens(tmp_path: Path) -> None:
    """One expert a token, one token: all ranks but one have nothing to compute."""
    written("mixtral window", tmp_path, num_local_experts=5)
    wanted = Runner(build(tmp_path)).prefill(0, [7])

    def run(ranks: ThreadRanks) -> Tensor:
        model = load_on(ranks, lambda: build(tmp_path, **PLACED))
        return Runner(model).prefill(0, [7])

    assert all(torch.equal(found, wanted) for found in on_ranks(4, run))


def test_ties_of_the_router_and_an_expert_without_tokens(tmp_path: Path) -> None:
    """Each token has two experts of equal scores, of which the first is the first in the sum; nothing goes to the last expert."""
    written("mixtral", tmp_path, num_local_experts=5, num_experts=5, num_experts_per_tok=2)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith("gate.weight")]:
        row = stored[name][0]
        stored[name] = torch.stack([row, row, -row, -row, torch.zeros_like(row)])
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    chosen: list[int] = []
    model = build(tmp_path, model_impl="quire")
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.register_forward_hook(lambda _, __, out: chosen.extend(out[0].flatten().tolist()))
    logits(model)
    assert set(chosen) == {0, 1, 2, 3}
    check(tmp_path, PlacedExperts, (2, 4), **PLACED)
    check(tmp_path, CutExperts, (2,))


def test_a_rank_has_only_its_experts(tmp_path: Path) -> None:
    written("qwen3 moe", tmp_path)
    tensors = sum(p.numel() for layer in experts_of(build(tmp_path)) for p in layer.parameters())

    def run(ranks: ThreadRanks) -> tuple[list[int], int]:
        layers = experts_of(load_on(ranks, lambda: build(tmp_path, **PLACED)))
        return [*layers[0].numbers], sum(p.numel() for layer in layers for p in layer.parameters())

    assert on_ranks(2, run) == [([0, 1, 2], tensors // 2), ([3, 4, 5], tensors // 2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_move_change_no_token(dtype: str, tmp_path: Path) -> None:
    """Loads of real routing, copies of busy experts, and a placement that is as even as it can be."""
    written("gpt-oss", tmp_path, num_local_experts=6)  # with biases
    kind = getattr(torch, dtype)
    wanted = logits(build(tmp_path, dtype=dtype), kind)

    def run(ranks: ThreadRanks) -> tuple[list[Tensor], list[int]]:
        eplb = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}}
        model: Any = load_on(ranks, lambda: build(tmp_path, dtype=dtype, **eplb, **PLACED))
        hook, plan = (
            ExpertBalanceHook(EplbOptions(step_interval=2, window_size=2)),
            SimpleNamespace(work=[1]),
        )
        hook.use_models([model])
        found, seats = logits(model, kind), []
        for _ in range(4):
            hook.after(plan)
            seats.append([layer.split.where for layer in experts_of(model)])
            found += logits(model, kind)
        assert seats[0] != seats[1], "no expert moved, so this proves nothing"
        return found, seats

    (first, seats), (second, others) = on_ranks(2, run)
    assert seats == others
    for found in (first, second):
        assert all(map(torch.equal, found, wanted * 5))
