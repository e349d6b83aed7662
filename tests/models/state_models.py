"""Models whose attention is, in some or all layers, a memory of all tokens so far: the smallest recurrent state.

Every token's output depends on all tokens before it, and on the two tokens just before it, so a state that is not reset,
or lacks a token, changes the next tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.forward_context import current_batch
from quire.kvcache.specs import StateSpec
from quire.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from quire.layers.state import StateLayer
from quire.models import registry
from quire.models.base import CausalLM
from tests.models.cases import edit_config

KEPT = 0.75


class Memory(StateLayer):
    """A decaying sum of all inputs, and the two inputs before the current one."""

    def __init__(self, hidden: int):
        super().__init__()
        self.hidden = hidden

    def state_spec(self) -> StateSpec:
        return StateSpec(((self.hidden,), (2, self.hidden)), ("float32", "bfloat16"))

    def forward(self, x_TD: Tensor, angles: object) -> Tensor:
        batch, out_TD = current_batch(), torch.zeros_like(x_TD)
        sum_RD, before_R2D = self.state
        starts = batch.query_start_B1.tolist()
        for b, row in enumerate(batch.rows_B.tolist()):
            for t in range(starts[b], starts[b + 1]):
                sum_RD[row] = KEPT * sum_RD[row] + x_TD[t].float()
                first_D, second_D = before_R2D[row].float()
                out_TD[t] = torch.tanh(sum_RD[row] + 0.5 * first_D - second_D).to(x_TD.dtype)
                before_R2D[row, 0], before_R2D[row, 1] = before_R2D[row, 1].clone(), x_TD[t]
        return out_TD


class MemoryModel(CausalLM):
    """Every other layer is attention."""

    every = 2

    def layer(self, i: int) -> nn.Module:
        attention = (
            SelfAttention(self.cfg, i) if i % self.every == 1 else Memory(self.cfg.hidden_size)
        )
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg))


class MemoryOnlyModel(MemoryModel):
    """No layer is attention."""

    every = 1 << 20


MODELS = {
    "MemoryForCausalLM": "tests.models.state_models:MemoryModel",
    "MemoryOnlyForCausalLM": "tests.models.state_models:MemoryOnlyModel",
}


def register(monkeypatch) -> None:
    """Register both models, for one test."""
    for name, target in MODELS.items():
        monkeypatch.setitem(registry.MODELS, name, target)
        monkeypatch.setitem(registry.LAYER_TYPES, name, frozenset({"memory"}))


def to_memory(path: Path, name: str) -> None:
    """Turn a checkpoint of Llama into one of the model `name`."""
    model, file = (
        {"MemoryForCausalLM": MemoryModel, "MemoryOnlyForCausalLM": MemoryOnlyModel}[name],
        path / "model.safetensors",
    )
    found = {
        key: tensor
        for key, tensor in load_file(file).items()
        if ".self_attn." not in key or int(key.split(".")[2]) % model.every == 1
    }
    save_file(found, file, metadata={"format": "pt"})
    edit_config(path, architectures=[name])
