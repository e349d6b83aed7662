"""Encoder layers: bidirectional attention in each prompt, no KV cache.

Knows one layer. Does not know families: these pass names and options.

Shape suffixes: T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.rotary import Angles
from quire.ops.reference import UNGATED

ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
"""Other names in config.json."""


class UngatedMLP(nn.Module):
    """down(act(up(x))).

    Args:
        names: of up and down in checkpoints.
    """

    def __init__(
        self, cfg: Any, *, bias: bool = True, names: Sequence[str] = ("up_proj", "down_proj")
    ):
        super().__init__()
        self.checkpoint_names = dict(zip(("up_proj", "down_proj"), names, strict=True))
        act = ACTIVATIONS.get(cfg.hidden_act, cfg.hidden_act)
        if act not in UNGATED:
            raise ConfigError(
                f"hidden_act={act!r} is not supported; choose from {', '.join(UNGATED)}"
            )
        self.up_proj = Linear(cfg.hidden_size, cfg.intermediate_size, bias=bias, after=act)
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x_TD))


class EncoderLayer(nn.Module):
    """norm(x + attention(x)), then the same with the MLP; or x + attention(norm(x)), with `pre_norm`.

    Args:
        names: of attention, its norm, the MLP, and its norm in checkpoints.
        attention_norm: None: attention has no norm.
    """

    def __init__(
        self,
        attention: nn.Module,
        attention_norm: Norm | None,
        mlp: nn.Module,
        mlp_norm: Norm,
        *,
        names: Sequence[str],
        pre_norm: bool = False,
    ):
        super().__init__()
        self.checkpoint_names = dict(
            zip(("self_attn", "attention_norm", "mlp", "mlp_norm"), names, strict=True)
        )
        self.self_attn, self.attention_norm = attention, attention_norm
        self.mlp, self.mlp_norm, self.pre_norm = mlp, mlp_norm, pre_norm

    def forward(self, x_TD: Tensor, angles: Angles) -> Tensor:
        if self.pre_norm:
            y_TD = x_TD if self.attention_norm is None else self.attention_norm(x_TD)
            x_TD = x_TD + self.self_attn(y_TD, angles)
            return x_TD + self.mlp(self.mlp_norm(x_TD))
        if self.attention_norm is None:
            raise RuntimeError("a layer with norms behind its halves has both")
        x_TD = self.attention_norm.add(self.self_attn(x_TD, angles), x_TD)[0]
        return self.mlp_norm.add(self.mlp(x_TD), x_TD)[0]
