"""Checkpoints for the benchmark of speculation, of any shape of Qwen3: full cost, random weights, and text that can be guessed.

`damped`: the last layers change little, so that the first ones alone are a draft model that is often right.
`transcribing`: the first layer writes what the end of the prompt names in other ids, so the model gives any answer that a benchmark wants.

Shapes: V vocabulary, D hidden, E head size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.shapes import Shape, checkpoint
from benchmarks.speculation_prompts import SOURCE

ADDED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a layer adds to the residual passes through these."""


def layer_of(name: str) -> int:
    """The number of a tensor's layer; -1: it belongs to none."""
    words = name.split(".")
    return int(words[2]) if words[1] == "layers" else -1


def damped(
    shape: Shape, folder: Path, layers: int = 4, factor: float = 0.18, spread: float = 0.5
) -> tuple[Path, Path]:
    """A target, and its first `layers` layers as a draft model.

    Args:
        factor: of what the target's other layers add. The smaller, the more often the draft is right: 0.18 gives about 0.8 with
            the shape of Qwen3-0.6B, 0.1 about 0.9.
        spread: standard deviation of the logarithm of the embedding's row lengths: as in trained models, some tokens are
            far more likely than others.
    """
    import torch

    lengths_V1 = (
        torch.empty(shape.vocab, 1).normal_(0.0, spread, generator=torch.Generator().manual_seed(1))
    ).exp()

    def change(name: str, weight: Any) -> None:
        if "embed_tokens" in name:
            weight.mul_(lengths_V1)
        elif layer_of(name) >= layers and name.endswith(ADDED):
            weight.mul_(factor)

    short = replace(shape, name=f"{shape.name}-first-{layers}-{spread}", layers=layers)
    whole = replace(shape, name=f"{shape.name}-damped-{layers}-{factor}-{spread}")
    return checkpoint(whole, "bfloat16", folder, change), checkpoint(
        short, "bfloat16", folder, change
    )


def transcribing(shape: Shape, folder: Path, factor: float = 0.01) -> Path:
    """A target that writes the answer which the last SOURCE tokens of its prompt name: each stands for a token of the lower half of the
    vocabulary, and is of the upper half. An attention head of layer 0 looks SOURCE - 1 positions back, and writes the token there.

    All other layers compute as usual, and add little (`factor`): they are damped, as in `damped`.
    """
    circuit = _Circuit(shape)

    def change(name: str, weight: Any) -> None:
        if "embed_tokens" in name:
            circuit.embed(weight)
        elif name.endswith(ADDED):
            weight.mul_(factor)
        if layer_of(name) == 0:
            circuit.change(name.split(".", 3)[3].removesuffix(".weight"), weight)

    return checkpoint(replace(shape, name=f"{shape.name}-transcribing"), "bfloat16", folder, change)


class _Circuit:
    """A hidden state has, from its first number on: a constant, E signs that name the token, and E of the token that it stands for."""

    def __init__(self, shape: Shape):
        import torch

        self.torch, self.size = torch, shape.head_dim
        self.token = slice(1, 1 + self.size)
        self.named = slice(1 + self.size, 1 + 2 * self.size)
        half = self.size // 2
        frequencies = 1_000_000.0 ** -(torch.arange(half) / half)
        self.fast = frequencies[: max(2, half // 8)]

    def embed(self, weight_VD: Any) -> None:
        """Every row has the same length, so the first norm divides all by the same number."""
        torch, half = self.torch, len(weight_VD) // 2
        draw = torch.Generator().manual_seed(2)
        signs = (torch.randint(0, 2, (half, self.size), generator=draw) * 2 - 1).to(weight_VD.dtype)
        weight_VD.zero_()
        weight_VD[:, 0] = 0.1
        weight_VD[:half, self.token] = 0.1 * signs
        weight_VD[half : 2 * half, self.named] = 0.1 * signs

    def change(self, name: str, weight: Any) -> None:
        """Write the circuit into the first query head and its keys and values of layer 0; sharpen the attention."""
        torch = self.torch
        if name in ("self_attn.q_norm", "self_attn.k_norm"):
            weight.fill_(math.sqrt(10.0))
        elif name == "self_attn.v_proj":
            weight[: self.size] = 0.0
            weight[: self.size, self.named] = torch.eye(self.size, dtype=weight.dtype)
        elif name == "self_attn.o_proj":
            weight[:, : self.size] = 0.0
            weight[self.token, : self.size] = torch.eye(self.size, dtype=weight.dtype)
        elif name in ("self_attn.q_proj", "self_attn.k_proj"):
            weight[: self.size] = 0.0
            self._look_back(name.endswith("q_proj"), weight)

    def _look_back(self, query: bool, weight: Any) -> None:
        """Rotate the query back by SOURCE - 1 positions, where it equals the key."""
        half, pairs = self.size // 2, self.torch.arange(len(self.fast))
        turn = self.fast * (SOURCE - 1) if query else self.torch.zeros_like(self.fast)
        weight[pairs, 0] = turn.cos().to(weight.dtype)
        weight[half + pairs, 0] = -turn.sin().to(weight.dtype)
