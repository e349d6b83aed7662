"""Speculators in plain float32 torch, over a whole text at once: what `test_speculators.py` compares with.

Each function takes the tensors of a checkpoint by the names in its file, and gives (states that are fed back, logits).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def attention(x: Tensor, weights: Weights, name: str, config: Mapping[str, Any]) -> Tensor:
    """Of Llama; with norms of heads, biases and a window if there are any."""
    length, size = len(x), config["head_dim"]
    angles = torch.arange(length)[:, None] * config["rope_theta"] ** (
        -torch.arange(0, size, 2) / size
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def heads(part: str) -> Tensor:
        y = linear(x, weights, f"{name}.{part}_proj").view(length, -1, size)
        if part == "v":
            return y
        if f"{name}.{part}_norm.weight" in weights:
            y = norm(y, weights[f"{name}.{part}_norm.weight"])
        turned = torch.complex(y[..., : size // 2], y[..., size // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    q, k, v = heads("q"), heads("k"), heads("v")
    k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
    apart = torch.arange(length)[:, None] - torch.arange(length)
    seen = (apart >= 0) & (apart < (config.get("sliding_window") or length))
    found = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return linear(found.flatten(1), weights, f"{name}.o_proj")


def mlp(x: Tensor, weights: Weights, name: str) -> Tensor:
    gate, up = linear(x, weights, f"{name}.gate_proj"), linear(x, weights, f"{name}.up_proj")
    return linear(F.silu(gate) * up, weights, f"{name}.down_proj")


def behind_attention(x: Tensor, weights: Weights, layer: str) -> Tensor:
    normed = norm(x, weights[f"{layer}.post_attention_layernorm.weight"])
    return x + mlp(normed, weights, f"{layer}.mlp")


def llama_layer(x: Tensor, weights: Weights, layer: str, config: Mapping[str, Any]) -> Tensor:
    normed = norm(x, weights[f"{layer}.input_layernorm.weight"])
    x = x + attention(normed, weights, f"{layer}.self_attn", config)
    return behind_attention(x, weights, layer)


def eagle(
    embeddings: Tensor, states: Tensor, weights: Weights, config: Mapping[str, Any], head: Tensor
) -> tuple[Tensor, Tensor]:
    x = linear(torch.cat((embeddings, states), -1), weights, "fc")
    x = x + attention(x, weights, "layers.0.self_attn", config)
    x = behind_attention(x, weights, "layers.0")
    for layer in range(1, config["num_hidden_layers"]):
        x = llama_layer(x, weights, f"layers.{layer}", config)
    return x, x @ head.T


def eagle3_states(raw: Tensor, weights: Weights, num_parts: int) -> Tensor:
    if "input_norm.weight" in weights:
        raw = norm(raw, weights["input_norm.weight"])
    if "fc_norm.0.weight" in weights:
        parts = raw.chunk(num_parts, -1)
        raw = torch.cat([norm(p, weights[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], -1)
    return linear(raw, weights, "fc")


def eagle3(
    embeddings: Tensor, states: Tensor, weights: Weights, config: Mapping[str, Any], head: Tensor
) -> tuple[Tensor, Tensor]:
    first = "midlayer" if "midlayer.hidden_norm.weight" in weights else "layers.0"
    normed = norm(states, weights[f"{first}.hidden_norm.weight"])
    residual = normed if config.get("norm_before_residual") else states
    x = torch.cat((norm(embeddings, weights[f"{first}.input_layernorm.weight"]), normed), -1)
    x = residual + attention(x, weights, f"{first}.self_attn", config)
    x = behind_attention(x, weights, first)
    for layer in range(1, config["num_hidden_layers"]):
        x = llama_layer(x, weights, f"layers.{layer}", config)
    out = norm(x, weights["norm.weight"])
    return out if config.get("norm_output") else x, out @ head.T


def medusa(states: Tensor, blocks: list[list[tuple[Tensor, Tensor | None]]], heads: list[Tensor]) -> list[Tensor]:  # fmt: skip
    """The logits of each head; blocks: by head, the weight and bias of each layer."""
    found = []
    for block, head in zip(blocks, heads, strict=True):
        x = states
        for weight, bias in block:
            y = x @ weight.T
            x = x + F.silu(y if bias is None else y + bias)
        found.append(x @ head.T)
    return found


def mlp_speculator(
    states: Tensor, tokens: Tensor, weights: Weights, config: Mapping[str, Any]
) -> list[Tensor]:
    """The logits of each pass; tokens: [passes, rows]."""
    if config["scale_input"]:
        ones = torch.ones(states.shape[-1])
        states = norm(states, ones, 1e-6) / math.sqrt(2)
    decay = 0.5 ** (0.5 / config["n_predict"])
    size = config["inner_dim"] or config["emb_dim"]
    found = []
    for step, ids in enumerate(tokens):
        x = states @ weights[f"proj.{step}.weight"].T * decay
        x = x + weights[f"emb.{step}.weight"][ids] * math.sqrt((1 - decay**2) * size / 2)
        x = norm(x / decay, weights[f"ln.{step}.weight"], 1e-6) + weights[f"ln.{step}.bias"]
        states = F.gelu(x)
        found.append(states @ weights[f"head.{step}.weight"].T)
    return found
