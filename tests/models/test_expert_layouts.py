"""Experts as families store them on disk, against one plain computation; every layout of the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.layers.moe import W123, Experts, MoE, Router
from quire.layers.weight_slots import slots_of
from quire.ops.experts import Routing

EXPERTS, TOKENS, K = 5, 17, 2
CPU = torch.device("cpu")


def by_expert(gate: Tensor, up: Tensor, down: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    parts = zip(names, (gate, up, down), strict=True)
    return {f"experts.{e}.{name}.weight": w[e] for name, w in parts for e in range(EXPERTS)}


def alternating(gate: Tensor, up: Tensor) -> Tensor:
    """[E, ..., I] twice -> [E, ..., 2I]."""
    return torch.stack((gate, up), -1).flatten(-2)


def layouts(gate: Tensor, up: Tensor, down: Tensor) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:  # fmt: skip
    """Name -> (keywords of `Experts`, tensors under `mlp.`); gate and up are [E, I, H], down is [E, H, I]."""
    proj = ("gate_proj", "up_proj", "down_proj")
    turned = [each.transpose(1, 2) for each in (gate, up, down)]
    halves = torch.cat((gate, up), 1)
    usual = {"experts.gate_up_proj": halves, "experts.down_proj": down}
    transposed = {
        "experts.gate_up_proj": halves.transpose(1, 2),
        "experts.down_proj": turned[2],
    }
    return {
        "proj": ({}, by_expert(gate, up, down, proj)),
        "w123": ({"names": W123}, by_expert(gate, up, down, W123)),
        "input_linear": (
            {"stacked": ("input_linear.weight", "output_linear.weight"), "by_expert": False},
            {"input_linear.weight": halves, "output_linear.weight": down},
        ),
        "stacked": ({}, usual),
        "transposed": ({"transposed": True, "by_expert": False}, transposed),
        "interleaved": (
            {"transposed": True, "interleaved": True, "by_expert": False},
            {
                "experts.gate_up_proj": alternating(turned[0], turned[1]),
                "experts.down_proj": turned[2],
            },
        ),
    }


def weights(hidden: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    gate, up, down = (torch.randn(EXPERTS, *shape) for shape in shapes)
    return gate, up, down


def loaded(hidden: int, inner: int, keywords: dict[str, Any], found: dict[str, Tensor]) -> MoE:
    """The layer with these weights, and a router of its own."""
    with torch.device("meta"):
        gate = Router(hidden, EXPERTS, Routing(K))
        model = nn.Module()
        model.mlp = MoE(gate, Experts(hidden, inner, EXPERTS, **keywords))
    slots = slots_of(model)
    router = torch.randn(EXPERTS, hidden, generator=torch.Generator().manual_seed(1))
    for name, tensor in {**found, "gate.weight": router}.items():
        slots[f"mlp.{name}"].fill(tensor.contiguous(), CPU, name)
    for layer in (model.mlp.gate, model.mlp.experts):
        layer.join()
    return model.mlp


def expected(
    mlp: MoE, x_TD: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: Any = None
) -> Tensor:
    ids_TK, weights_TK = mlp.gate(x_TD)
    y_TD = torch.zeros_like(x_TD)
    act = act or (lambda g, u: F.silu(g) * u)
    for t in range(len(x_TD)):
        for e, weight in zip(ids_TK[t], weights_TK[t], strict=True):
            y_TD[t] += weight * (down[e] @ act(gate[e] @ x_TD[t], up[e] @ x_TD[t]))
    return y_TD


@pytest.mark.parametrize(("hidden", "inner"), [(12, 10), (16, 8), (8, 8)])
@pytest.mark.parametrize("layout", ["proj", "w123", "input_linear", "stacked", "transposed", "interleaved"])  # fmt: skip
@torch.inference_mode()
def test_every_layout_gives_the_same_layer(layout: str, hidden: int, inner: int) -> None:
    """Also where H == 2I or H == I, whose shapes do not show the orientation."""
    torch.manual_seed(0)
    gate, up, down = weights(hidden, inner)
    x_TD = torch.randn(TOKENS, hidden)
    mlp = loaded(hidden, inner, *layouts(gate, up, down)[layout])
    assert (mlp(x_TD) - expected(mlp, x_TD, gate, up, down)).abs().max() < 1e-4
    rows = torch.cat([mlp(x_TD[t : t + 1]) for t in range(TOKENS)])
    assert torch.equal(rows, mlp(x_TD))
    for ref in mlp.experts.weights():
        assert ref.weight.is_contiguous()


@torch.inference_mode()
def test_biases_and_a_clamp_as_of_gpt_oss() -> None:
    torch.manual_seed(0)
    hidden, inner = 12, 10
    gate, up, down = (3 * each for each in weights(hidden, inner))
    b_gate, b_up, b_down = (torch.randn(EXPERTS, n) for n in (inner, inner, hidden))
    keywords, found = layouts(gate, up, down)["interleaved"]
    found = {
        **found,
        "experts.gate_up_proj_bias": alternating(b_gate, b_up),
        "experts.down_proj_bias": b_down,
    }
    mlp = loaded(hidden, inner, {**keywords, "act": "clamped_swiglu", "bias": True}, found)
    x_TD = torch.randn(TOKENS, hidden)
    ids_TK, weights_TK = mlp.gate(x_TD)
    wanted, clamped = torch.zeros_like(x_TD), 0
    for t in range(TOKENS):
        for e, weight in zip(ids_TK[t], weights_TK[t], strict=True):
            g, u = gate[e] @ x_TD[t] + b_gate[e], up[e] @ x_TD[t] + b_up[e]
            clamped += int((g > 7).sum() + (u.abs() > 7).sum())
            g, u = g.clamp(max=7), u.clamp(-7, 7)
            wanted[t] += weight * (down[e] @ ((u + 1) * g * (1.702 * g).sigmoid()) + b_down[e])
    assert clamped > 20
    assert (mlp(x_TD) - wanted).abs().max() < 1e-3


@torch.inference_mode()
def test_experts_without_a_gate() -> None:
    torch.manual_seed(0)
    gate, up, down = weights(12, 10)
    found = {k: v for k, v in layouts(gate, up, down)["proj"][1].items() if "gate_proj" not in k}
    mlp = loaded(12, 10, {"act": "relu2"}, found)
    x_TD = torch.randn(TOKENS, 12)
    wanted = expected(mlp, x_TD, gate, up, down, lambda g, u: u.relu().square())
    assert (mlp(x_TD) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("gated", [False, True])
@torch.inference_mode()
def test_a_shared_expert(gated: bool) -> None:
    torch.manual_seed(0)
    gate, up, down = weights(12, 10)
    mlp = loaded(12, 10, *layouts(gate, up, down)["proj"])
    x_TD, shared = torch.randn(TOKENS, 12), nn.Linear(12, 12)
    both = MoE(mlp.gate, mlp.experts, shared, shared_gate=12 if gated else 0)
    wanted = shared(x_TD)
    if gated:
        assert both.shared_gate is not None
        both.shared_gate.weight.data.normal_()
        wanted = wanted * (x_TD @ both.shared_gate.weight.T).sigmoid()
    assert (both(x_TD) - mlp(x_TD) - wanted).abs().max() < 1e-5


@torch.inference_mode()
def test_weights_on_the_input() -> None:
    torch.manual_seed(0)
    gate, up, down = weights(12, 10)
    keywords, found = layouts(gate, up, down)["transposed"]
    mlp = loaded(12, 10, {**keywords, "on_input": True}, found)
    x_TD = torch.randn(TOKENS, 12)
    ids_TK, weights_TK = mlp.gate(x_TD)
    wanted = torch.zeros_like(x_TD)
    for t in range(TOKENS):
        for e, weight in zip(ids_TK[t], weights_TK[t], strict=True):
            x_D = x_TD[t] * weight
            wanted[t] += down[e] @ (F.silu(gate[e] @ x_D) * (up[e] @ x_D))
    assert (mlp(x_TD) - wanted).abs().max() < 1e-4
