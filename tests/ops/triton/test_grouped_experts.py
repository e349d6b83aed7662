"""Routed experts by a grouped GEMM: equal to the definition, whatever rows are together."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ops.triton.kernel_device import DEVICE, DTYPES, needs_row_invariance
from torch import Tensor

from quire.layers.moe import Experts
from quire.ops import experts as definitions
from quire.ops.triton import expert_blocks
from quire.ops.triton import experts as kernels
from quire.quantization.group_quant import Grouped
from quire.quantization.int4 import quantize_groups
from quire.quantization.int8 import Int8Codes
from quire.quantization.wna16 import FewBitsWeight

HIDDEN, INNER, EXPERTS, CHOSEN = 48, 40, 5, 2


def layer(
    dtype: torch.dtype, act: str, biased: bool, hidden: int = HIDDEN, inner: int = INNER
) -> Experts:
    torch.manual_seed(len(act))
    made = Experts(hidden, inner, EXPERTS, act=act, bias=biased).to(DEVICE, dtype)
    for parameter in made.parameters():
        parameter.data.normal_(std=0.2)
    return made


def routed(tokens: int, dtype: torch.dtype, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    weights_TK, ids_TK = torch.rand(tokens, EXPERTS, device=DEVICE).topk(CHOSEN)
    return torch.randn(tokens, hidden, device=DEVICE).to(dtype), ids_TK, weights_TK


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "clamped_swiglu", "relu2"])
def test_the_definition(act: str, dtype: torch.dtype) -> None:
    made = layer(dtype, act, act != "silu")
    for tokens in (1, 20):
        x_TD, ids_TK, weights_TK = routed(tokens, dtype)
        x_TD *= 3  # some values beyond the limit of the clamped activation
        ids_TK[0, 1] = -1  # an expert of another place
        want = definitions.experts.reference(x_TD, ids_TK, weights_TK, made.of)
        found = kernels.experts(x_TD, ids_TK, weights_TK, made.of)
        assert made.of.prepared is not None
        share = 1e-5 if dtype == torch.float32 else 4e-3
        assert float((found - want).abs().max()) < share * float(want.abs().max())


@needs_row_invariance
def test_a_row_does_not_depend_on_other_rows() -> None:
    made = layer(torch.float32, "silu", False)
    x_TD, ids_TK, weights_TK = routed(21, torch.float32)
    together = kernels.experts(x_TD, ids_TK, weights_TK, made.of)
    for t in (0, 20):
        at = slice(t, t + 1)
        alone = kernels.experts(x_TD[at], ids_TK[at], weights_TK[at], made.of)
        assert torch.equal(alone[0], together[t])


@pytest.mark.parametrize("m", [16, 32])
def test_places_of_pairs(m: int) -> None:
    """Each pair has one place, in a block of its expert, in order; shapes do not depend on the choice."""
    ids_TK = torch.randint(-1, EXPERTS + 1, (30, CHOSEN), device=DEVICE)
    for ids in (ids_TK, torch.full_like(ids_TK, 3), torch.full_like(ids_TK, -1)):
        places, expert_B = expert_blocks.align(ids, EXPERTS, m)
        assert len(places) == m * len(expert_B) == -(-(60 + EXPERTS * (m - 1)) // m) * m
        found = []
        for block, expert in zip(places.view(-1, m).tolist(), expert_B.tolist(), strict=True):
            pairs = [pair for pair in block if pair < 60]
            assert expert < EXPERTS or not pairs
            assert all(ids.flatten()[pair] == expert for pair in pairs)
            found += pairs
        wanted = [p for p, e in enumerate(ids.flatten().tolist()) if 0 <= e < EXPERTS]
        assert found == sorted(wanted, key=lambda p: int(ids.flatten()[p]))


def quantized(form: str, dtype: torch.dtype, act: str, biased: bool) -> Experts:
    """The layer with quantized weights; its down weights have other inputs, so "int4" may be int8 there."""
    made = layer(dtype, act, biased, hidden=64, inner=96 if form != "mixed" else 40)
    for ref in made.weights():
        make = Int8Codes.of if form == "int8" else partial(FewBitsWeight.int4, group=32)
        prepared = make(ref.weight, ref.gated, None)
        if form == "8 bits":
            grouped = quantize_groups(ref.weight, 32)
            eight = Grouped(grouped.q_OI + 100, grouped.scale_OG, grouped.zero_OG + 90)
            prepared = FewBitsWeight(eight, 8, ref.gated)
        ref.install(prepared)
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "act"),
    [("int8", "silu"), ("int4", "clamped_swiglu"), ("8 bits", "relu2"), ("mixed", "gelu")],
)
def test_quantized_weights(form: str, act: str, dtype: torch.dtype) -> None:
    made = quantized(form, dtype, act, act != "silu")
    for tokens in (1, 12):
        x_TD, ids_TK, weights_TK = routed(tokens, dtype, 64)
        ids_TK[0, 1] = EXPERTS
        want = definitions.experts.reference(x_TD, ids_TK, weights_TK, made.of)
        found = kernels.experts(x_TD, ids_TK, weights_TK, made.of)
        assert made.of.prepared is not None
        share = 1e-5 if dtype == torch.float32 else 4e-3
        assert float((found - want).abs().max()) < share * float(want.abs().max())


def test_what_no_kernel_takes_runs_the_definition() -> None:
    """Experts of several forms, and inputs in another order."""
    made = quantized("int4", torch.float32, "silu", False)
    first = made.of.gate_up[0].prepared
    first.order_I = torch.randperm(64, device=DEVICE).int()
    assert kernels.grouped(made.of) is None
    first.order_I = None
    made.of.gate_up[1].install(Int8Codes.of(torch.randn(192, 64), True, None))
    assert kernels.grouped(made.of) is None
