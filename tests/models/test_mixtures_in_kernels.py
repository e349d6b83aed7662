"""Mixtures in bfloat16: the CPU kernels compute them, and a row's bits do not depend on the others."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from quire.attention.cpu import CpuAttention
from quire.layers.moe import Experts
from quire.ops import experts as definitions
from quire.ops.cpu.bindings import best
from tests.models.cases import MOE, OSS, Case, write
from tests.models.harness import Runner
from tests.models.test_native import build, in_pieces, plain, texts

SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32}
CASES = [
    Case("qwen3 moe", "qwen3_moe", {**MOE, **SIZES, "norm_topk_prob": True}),
    Case("gpt-oss", "gpt_oss", {**MOE, **OSS, **SIZES}),
]


@pytest.mark.skipif(best() is None, reason="no CPU kernels")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_rows_alone_and_in_pieces(case: Case, tmp_path: Path) -> None:
    theirs = write(case, tmp_path)
    ours = build(tmp_path, dtype="bfloat16")
    assert definitions.experts.run is definitions.experts.implementations["native"]
    assert definitions.route.run is definitions.route.implementations["native"]
    truth = plain(copy.deepcopy(theirs), texts()[0])
    bound = (plain(theirs.bfloat16(), texts()[0]) - truth).square().mean().sqrt()
    kernels = {"dtype": torch.bfloat16, "backend": CpuAttention()}
    whole = [Runner(ours, **kernels).prefill(0, text) for text in texts()]
    assert (whole[0] - truth).square().mean().sqrt() < 2 * bound
    pieces = in_pieces(Runner(ours, **kernels), texts(), seed=3, most=17)
    for got, alone in zip(pieces, whole, strict=True):
        assert torch.equal(got, alone)
    for layer in ours.modules():
        if isinstance(layer, Experts):
            assert layer.of.prepared is not None, "the kernels did not run"
