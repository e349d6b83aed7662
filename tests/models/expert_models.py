"""Two models whose MLP is two experts, chosen by the sign of a feature: one layer with two weights, and its reference.

`StackedExperts` implements `Layer.weights` alone: no module of Quire knows it. `LinearExperts` computes the same with
`Linear`. Both load the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.layers.decoder_layer import DecoderLayer, SelfAttention
from quire.layers.linear import Linear
from quire.layers.weight_slots import Layer
from quire.layers.weights import WeightRef
from quire.models.base import CausalLM
from tests.models.cases import edit_config

EXPERTS = range(2)


class StackedExperts(Layer):
    """The weights of all experts in one layer."""

    may_defer = True

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.up, self.down = [], []
        for e in EXPERTS:
            up = {f"experts.{e}.gate_proj": inner, f"experts.{e}.up_proj": inner}
            self.up.append(WeightRef(self, hidden, up, gated=True, prefix=f"up_{e}_"))
            down = {f"experts.{e}.down_proj": hidden}
            self.down.append(WeightRef(self, inner, down, prefix=f"down_{e}_"))

    def weights(self) -> Iterable[WeightRef]:
        return (*self.up, *self.down)

    def forward(self, x_TD: Tensor) -> Tensor:
        first, second = (self.down[e].multiply(self.up[e].multiply(x_TD)) for e in EXPERTS)
        return torch.where(x_TD[:, :1] < 0, first, second)


class LinearExpert(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_up = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, act="silu")
        self.down_proj = Linear(inner, hidden)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.gate_up(x_TD))


class LinearExperts(nn.ModuleList):
    def __init__(self, hidden: int, inner: int):
        super().__init__(LinearExpert(hidden, inner) for _ in EXPERTS)

    def forward(self, x_TD: Tensor) -> Tensor:
        first, second = (expert(x_TD) for expert in self)
        return torch.where(x_TD[:, :1] < 0, first, second)


class ExpertMLP(nn.Module):
    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.experts(x_TD)


class StackedModel(CausalLM):
    experts: Any = StackedExperts

    def layer(self, i: int) -> nn.Module:
        experts = self.experts(self.cfg.hidden_size, self.cfg.intermediate_size // len(EXPERTS))
        attention = SelfAttention(self.cfg, i, qk_norm=True)
        return DecoderLayer(self.cfg, attention, ExpertMLP(experts))


class LinearModel(StackedModel):
    experts = LinearExperts


MODELS = {
    "StackedForCausalLM": "tests.models.expert_models:StackedModel",
    "LinearForCausalLM": "tests.models.expert_models:LinearModel",
}


def divide(path: Path) -> None:
    """Turn each dense MLP of a checkpoint into experts, each a half of its inner size."""
    found, file = {}, path / "model.safetensors"
    for name, tensor in load_file(file).items():
        layer, dot, part = name.partition(".mlp.")
        if not dot:
            found[name] = tensor
            continue
        dim = 1 if part.startswith("down_proj") else 0
        for e, half in enumerate(tensor.chunk(len(EXPERTS), dim)):
            found[f"{layer}.mlp.experts.{e}.{part}"] = half.contiguous()
    save_file(found, file, metadata={"format": "pt"})


def name_architecture(path: Path, name: str) -> None:
    edit_config(path, architectures=[name])
