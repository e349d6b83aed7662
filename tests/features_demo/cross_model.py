"""A small decoder with cross attention, and its encoder: the mean of the source's embeddings is mixed into each of its states.

`reference` computes the same from the files with plain torch, for one request, without caches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from quire.layers.cross_attention import CrossAttention
from quire.layers.decoder_layer import Angles, DecoderLayer, GatedMLP, SelfAttention, normed_sum
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig
from quire.parallel.ranks import head_slices

ARCHITECTURE = "CrossDemoForCausalLM"
MAX_ENCODER_LEN = 300  # longer than max_model_len in the tests


class CrossLayer(DecoderLayer):
    """A decoder layer with cross attention between attention and MLP."""

    def __init__(self, cfg: TextConfig, attention: nn.Module, mlp: nn.Module, number: int):
        super().__init__(cfg, attention, mlp)
        heads, size = (cfg.num_attention_heads, cfg.num_key_value_heads), cfg.head_dim
        shares = head_slices(*heads)
        q, kv = (shares[0].length, shares[1].length) if shares else heads
        own = [share.times(size) for share in shares]
        self.counts = q, kv
        self.cross_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.cross_q = Linear(cfg.hidden_size, {"cross_q": q * size}, shares=own[:1])
        parts = {"cross_k": kv * size, "cross_v": kv * size}
        self.cross_kv = Linear(cfg.hidden_size, parts, shares=[*own[1:], *own[1:]])
        self.cross_o = Linear(heads[0] * size, cfg.hidden_size, gathers=bool(shares))
        self.cross = CrossAttention(
            q, kv, size, max_encoder_len=MAX_ENCODER_LEN, layer_index=number
        )

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention_sublayer(x_TD, residual_TD, angles)
        x_TD, residual_TD = normed_sum(self.cross_norm, x_TD, residual_TD)
        return self.mlp_sublayer(self.cross_sublayer(x_TD), residual_TD)

    def cross_sublayer(self, x_TD: Tensor) -> Tensor:
        q_THD = self.cross_q(x_TD).unflatten(-1, (self.counts[0], -1))
        k_SKD = v_SKD = None
        if (states_SD := self.cross.new_states()) is not None:
            both = self.cross_kv(states_SD).unflatten(-1, (2, self.counts[1], -1))
            k_SKD, v_SKD = both.unbind(1)
        return self.cross_o(self.cross(q_THD, k_SKD, v_SKD).flatten(-2))


class Encoder(nn.Module):
    def __init__(self, cfg: TextConfig):
        super().__init__()
        self.embed = Embedding(cfg.vocab_size, cfg.hidden_size)
        self.mix = Linear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, ids_S: Tensor) -> Tensor:
        states_SD: Tensor = self.embed(ids_S)
        mean_1D: Tensor = self.mix(states_SD.mean(0, keepdim=True))
        return states_SD + mean_1D


class CrossDecoder(CausalLM):
    capturable = False

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        self.encoder = Encoder(cfg)

    def layer(self, i: int) -> nn.Module:
        return CrossLayer(self.cfg, SelfAttention(self.cfg, i), GatedMLP(self.cfg), i)


def add_cross_attention(path: str) -> None:
    """Turn a Llama checkpoint into one of `CrossDecoder`: more weights, and another architecture."""
    config_file, weights_file = Path(path) / "config.json", Path(path) / "model.safetensors"
    config = json.loads(config_file.read_text())
    weights = load_file(weights_file)
    draw = torch.Generator().manual_seed(1)
    width = config["hidden_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    q = config["num_attention_heads"] * config["head_dim"]
    shapes = {"encoder.embed.weight": (config["vocab_size"], width), "encoder.mix.weight": (width, width)}  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        start = f"model.layers.{i}.cross_"
        shapes |= {
            start + "q.weight": (q, width), start + "k.weight": (kv, width), start + "v.weight": (kv, width),
            start + "o.weight": (width, q), start + "norm.weight": (width,),
        }  # fmt: skip
    for name, shape in shapes.items():
        weights[name] = torch.randn(shape, generator=draw) * 0.3
    save_file(weights, weights_file, {"format": "pt"})
    config_file.write_text(json.dumps({**config, "architectures": [ARCHITECTURE]}))


def reference(path: str, source: list[int], prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of one request, in plain torch and float64."""
    config = json.loads((Path(path) / "config.json").read_text())
    weights = {n: t.double() for n, t in load_file(Path(path) / "model.safetensors").items()}
    states = F.embedding(torch.tensor(source), weights["encoder.embed.weight"])
    states = states + states.mean(0, keepdim=True) @ weights["encoder.mix.weight"].T
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(_logits(config, weights, states, tokens).argmax()))
    return tokens[len(prompt) :]


def _logits(
    config: dict[str, Any], weights: dict[str, Tensor], states: Tensor, tokens: list[int]
) -> Tensor:
    x = F.embedding(torch.tensor(tokens), weights["model.embed_tokens.weight"])
    for i in range(config["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        h = _norm(config, x, layer["input_layernorm.weight"])
        attention = {part: layer[f"self_attn.{part}_proj.weight"] for part in "qkvo"}
        x = x + _attend(config, attention, h, h, causal=True)
        h = _norm(config, x, layer["cross_norm.weight"])
        cross = {part: layer[f"cross_{part}.weight"] for part in "qkvo"}
        x = x + _attend(config, cross, h, states, causal=False)
        h = _norm(config, x, layer["post_attention_layernorm.weight"])
        gate = F.silu(h @ layer["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return _norm(config, x[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _norm(config: dict[str, Any], x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def _attend(
    config: dict[str, Any], parts: dict[str, Tensor], x: Tensor, context: Tensor, causal: bool
) -> Tensor:
    size = config["head_dim"]
    q, k, v = (
        (of @ parts[part].T).unflatten(-1, (-1, size)).transpose(0, 1)
        for part, of in (("q", x), ("k", context), ("v", context))
    )
    if causal:
        q, k = _rotate(q), _rotate(k)
    repeats = len(q) // len(k)
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores = q @ k.transpose(1, 2) / size**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ parts["o"].T


def _rotate(x: Tensor, theta: float = 10_000.0) -> Tensor:
    size = x.shape[-1]
    angles = (
        torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(0, size, 2) / size).double()
    )
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
