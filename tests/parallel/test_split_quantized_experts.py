"""Experts of quantized checkpoints on ranks, cut or whole: the bits of one process, and experts that move with their scales."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.expert_parallel import CutExperts, PlacedExperts
from quire.layers.moe import Experts
from tests.models.cases import write
from tests.models.harness import Runner
from tests.models.test_native import build, texts
from tests.parallel.thread_ranks import ThreadRanks, load_on, on_ranks
from tests.quantization import test_quantized_experts
from tests.quantization.test_quantized_experts import QWEN, oss_in_mxfp4
from tests.quantization.test_quantized_formats import quantized
from tests.quantization.writers import FORMS

WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "head_dim": 32}
PLACED = {"enable_expert_parallel": True, "tensor_parallel_size": 2}
MOVING = {**PLACED, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}}
QUICK = {"gptq", "ct int8"}
NAMES = [
    pytest.param(form.name, marks=() if form.name in QUICK else pytest.mark.slow) for form in FORMS
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write(replace(QWEN, config={**QWEN.config, **WIDE}), folder)
    return folder


def check(folder: Path, kind: type, **asked: Any) -> None:
    text = texts(lengths=(19,))[0]
    wanted = Runner(build(folder)).prefill(0, text)

    def run(ranks: ThreadRanks) -> list[Tensor]:
        model = load_on(ranks, lambda: build(folder, **asked))
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        assert {type(layer.split) for layer in layers} == {kind}
        found = [Runner(model).prefill(0, text)]
        if "enable_eplb" in asked:
            assert all(layer.can_move() for layer in layers)
            moved = [layer.move(((3, 1, 2), (2, 0, 1))) for layer in layers]
            assert all(moved)
            found.append(Runner(model).prefill(0, text))
        return found

    for found in on_ranks(2, run):
        assert all(torch.equal(each, wanted) for each in found)


@pytest.mark.parametrize("name", NAMES)
def test_experts_of_a_quantized_checkpoint(name: str, mixture: Path, tmp_path: Path) -> None:
    stored, _, _ = quantized(mixture, tmp_path, {form.name: form for form in FORMS}[name])
    check(stored, PlacedExperts, **MOVING)
    check(stored, CutExperts)


@pytest.mark.parametrize("placed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_experts_in_mxfp4(placed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales of all experts in one tensor each."""
    monkeypatch.setattr(test_quantized_experts, "SIZES", WIDE)
    oss_in_mxfp4(tmp_path)
    check(tmp_path, PlacedExperts if placed else CutExperts, **(PLACED if placed else {}))
