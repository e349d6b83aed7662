"""RWKV-4: a weighed mean of all values in place of attention, and the token before in every product.

The halving of hidden states every few layers, which keeps float16 in range, is left out: norms cancel it.

Shape suffixes: T tokens, D features.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.kvcache.specs import StateSpec
from quire.layers.decoder_layer import DecoderLayer
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm, Norm
from quire.layers.recurrent import step_rows
from quire.layers.rotary import Angles
from quire.layers.state import StateLayer
from quire.models.base import CausalLM
from quire.ops.recurrent import StateRows, causal_conv, wkv
from quire.ops.reference import sigmoid
from quire.parallel.ranks import output_slices


class TokenShift(StateLayer):
    """The base of both sublayers: mixes a token with the one before it, in parts that a weight says."""

    mixes: tuple[str, ...]

    def __init__(self, hidden: int):
        super().__init__()
        self.dtype = torch.get_default_dtype()
        for name in self.mixes:
            self.new(f"time_mix_{name}", hidden)

    def state_spec(self) -> StateSpec:
        hidden = len(self.get_parameter(f"time_mix_{self.mixes[0]}"))
        return StateSpec(((1, hidden),), (str(self.dtype).removeprefix("torch."),))

    def mixed(self, x_TD: Tensor, rows: StateRows) -> list[Tensor]:
        """The inputs of the products, in the order of `mixes`."""
        taps_DJ = x_TD.new_tensor([1.0, 0.0]).expand(x_TD.shape[1], 2).contiguous()
        before_TD = causal_conv(x_TD, taps_DJ, None, self.state[0], rows, False)
        mixes = (self.get_parameter(f"time_mix_{name}") for name in self.mixes)
        return [x_TD * mix_D + before_TD * (1 - mix_D) for mix_D in mixes]


class TimeMix(TokenShift):
    """The sublayer in place of attention. Ranks split the channels of its means."""

    mixes = ("key", "value", "receptance")
    time_decay: Tensor
    time_first: Tensor

    def __init__(self, hidden: int, inner: int):
        super().__init__(hidden)
        shares = output_slices(inner)
        self.inner = own = shares[0].length if shares else inner
        self.new("time_decay", own)
        self.new("time_first", own)
        self.own_shares |= {"time_decay": shares, "time_first": shares}
        self.key, self.value, self.receptance = (
            Linear(hidden, own, shares=shares) for _ in range(3)
        )
        self.output = Linear(inner, hidden, gathers=bool(shares))

    def state_spec(self) -> StateSpec:
        shift = super().state_spec()
        return StateSpec((*shift.shapes, (3, self.inner)), (*shift.dtypes, "float32"))

    def forward(self, x_TD: Tensor, angles: Angles) -> Tensor:
        rows = step_rows()
        key, value, receptance = self.mixed(x_TD, rows)
        k, v = self.key(key).float(), self.value(value).float()
        decay, first = self.time_decay.float(), self.time_first.float()
        mean = wkv(k, v, decay, first, self.state[1], rows)
        return self.output((sigmoid(self.receptance(receptance)) * mean).to(x_TD.dtype))


class ChannelMix(TokenShift):
    """The sublayer in place of an MLP. Each rank has the whole weight of its gate."""

    mixes = ("key", "receptance")

    def __init__(self, hidden: int, inner: int):
        super().__init__(hidden)
        shares = output_slices(inner)
        self.key = Linear(hidden, shares[0].length if shares else inner, shares=shares)
        self.value = Linear(inner, hidden, gathers=bool(shares))
        self.receptance = Linear(hidden, hidden)

    def forward(self, x_TD: Tensor) -> Tensor:
        key, receptance = self.mixed(x_TD, step_rows())
        value_TD = self.value(F.relu(self.key(key)).square())
        return sigmoid(self.receptance(receptance)).to(x_TD.dtype) * value_TD


class FirstLayer(DecoderLayer):
    """The first layer, which begins with a norm of the embeddings."""

    pre_ln: Norm

    def attention_sublayer(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        return super().attention_sublayer(self.pre_ln(x_TD), residual_TD, angles)


class Rwkv(CausalLM):
    """RWKV-4 (World and Pile)."""

    checkpoint_names: ClassVar = {"model": "rwkv", "lm_head": "head"}
    decoder_names: ClassVar = {"embed_tokens": "embeddings", "layers": "blocks", "norm": "ln_out"}

    def norm(self, size: int) -> Norm:
        return LayerNorm(size, eps=self.cfg.rms_norm_eps, bias=True)

    def layer(self, i: int) -> nn.Module:
        cfg, hidden = self.cfg, self.cfg.hidden_size
        time_mix = TimeMix(hidden, cfg.get("attention_hidden_size", hidden))
        mlp = ChannelMix(hidden, cfg.get("intermediate_size", 4 * hidden))
        kind = DecoderLayer if i else FirstLayer
        layer = kind(cfg, time_mix, mlp, norms=("ln1", None, "ln2", None), norm=self.norm)
        if isinstance(layer, FirstLayer):
            layer.pre_ln = self.norm(hidden)
        layer.checkpoint_names = {"self_attn": "attention", "mlp": "feed_forward"}
        return layer
