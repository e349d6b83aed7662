"""Falcon-H1: attention and Mamba-2 side by side on one input, with factors everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from quire.layers.decoder_layer import DecoderLayer, SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.rotary import Angles
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig
from quire.models.mamba_hybrids import NORMS, mamba2, named
from quire.ops.recurrent import silu
from quire.parallel.ranks import output_slices


class BothMixers(nn.Module):
    """The sum of attention and Mamba-2, each with factors of its input and its output."""

    def __init__(self, cfg: TextConfig, layer: int):
        super().__init__()
        norm = cfg.get("mamba_rms_norm", False)
        self.mamba = mamba2(
            cfg,
            cfg.get("mamba_d_ssm"),
            norm=norm,
            gate_first=not cfg.get("mamba_norm_before_gate", True),
            out_bias=cfg.get("projectors_bias", False),
            scales=cfg.get("ssm_multipliers"),
        )
        scale = cfg.head_dim**-0.5 * cfg.get("key_multiplier", 1.0)
        bias = cfg.attention_bias
        self.self_attn = SelfAttention(cfg, layer, scale=scale, qkv_bias=bias, o_bias=bias)
        self.factors = [
            cfg.get(f"{name}_multiplier", 1.0)
            for name in ("ssm_in", "ssm_out", "attention_in", "attention_out")
        ]

    def forward(self, x_TD: Tensor, angles: Angles) -> Tensor:
        ssm_in, ssm_out, attention_in, attention_out = self.factors
        y_TD = self.mamba(x_TD * ssm_in) * ssm_out
        return y_TD + self.self_attn(x_TD * attention_in, angles) * attention_out


class ScaledMLP(nn.Module):
    """down(silu(a * gate(x)) * up(x)) * b."""

    def __init__(self, cfg: TextConfig, factors: Sequence[float]):
        super().__init__()
        self.factors, inner = factors, cfg.intermediate_size
        shares = output_slices(inner)
        own = shares[0].length if shares else inner
        parts = {"gate_proj": own, "up_proj": own}
        self.gate_up = Linear(cfg.hidden_size, parts, bias=cfg.mlp_bias, shares=(*shares, *shares))
        self.down_proj = Linear(inner, cfg.hidden_size, bias=cfg.mlp_bias, gathers=bool(shares))

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD).chunk(2, -1)
        gate_TI = silu(gate_TI.float() * self.factors[0]).to(up_TI.dtype)
        return self.down_proj(gate_TI * up_TI) * self.factors[1]


class FalconH1(CausalLM):
    """Falcon-H1."""

    decoder_names: ClassVar = {"norm": "final_layernorm"}

    scales_after_lookup = True

    def embedding_scale(self, cfg: TextConfig) -> float | None:
        return cfg.get("embedding_multiplier")

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head:
        scale = cfg.get("lm_head_multiplier", 1.0)
        return Head(cfg.vocab_size, cfg.hidden_size, tied=tied, scale=scale)

    def layer(self, i: int) -> nn.Module:
        mlp = ScaledMLP(self.cfg, self.cfg.get("mlp_multipliers", (1.0, 1.0)))
        layer = DecoderLayer(self.cfg, BothMixers(self.cfg, i), mlp, norms=NORMS)
        return named(layer, self_attn="", mlp="feed_forward")
