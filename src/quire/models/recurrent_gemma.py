"""RecurrentGemma (Griffin): gated linear recurrences, and attention with a window in every third layer.

Shape suffixes: T tokens, D features, C channels of the recurrence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from quire.forward_context import current_batch
from quire.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.recurrent import CausalConv, RecurrentLayer, own_heads, step_rows
from quire.layers.rotary import Angles
from quire.layers.weight_slots import Layer, Slot, StackedSlot, WeightSlot
from quire.layers.weights import WeightRef
from quire.models.gemma import Gemma
from quire.models.hf_config import TextConfig
from quire.models.mamba_hybrids import named
from quire.ops.recurrent import decaying_sum, softplus
from quire.ops.reference import sigmoid
from quire.parallel.ranks import OutputSlice

GATES = ("input_gate", "recurrent_gate")


class Recurrence(Layer):
    """The weights of a real-gated linear recurrent unit: two gates, each a product by head, and a decay.

    `heads`: of this rank.
    """

    recurrent_param: Tensor

    def __init__(self, heads: OutputSlice, size: int):
        super().__init__()
        self.heads, self.size = heads, size
        self.new("recurrent_param", heads.length * size)
        numbers = range(heads.length)
        self.gates = [[self._weight(f"{gate}_{head}_") for head in numbers] for gate in GATES]

    def _weight(self, prefix: str) -> WeightRef:
        return WeightRef(self, self.size, self.size, bias=True, prefix=prefix, exact=True)

    def weights(self) -> Iterable[WeightRef]:
        return [ref for gate in self.gates for ref in gate]

    def slots(self, path: str) -> dict[str, Slot]:
        heads, shares = self.heads, (self.heads.times(self.size),)
        decays = WeightSlot(self, "recurrent_param", shares=shares)
        found: dict[str, Slot] = {f"{path}.recurrent_param": decays}
        numbers = range(heads.start, heads.start + heads.length)
        for gate, refs in zip(GATES, self.gates, strict=True):
            for name in ("weight", "bias"):
                one_by_one = [WeightSlot(self, ref.prefix + name, ref=ref) for ref in refs]
                found[f"{path}.{gate}_{name}"] = StackedSlot(
                    one_by_one, transposed=True, numbers=numbers, total=heads.total
                )
        return found

    def forward(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the recurrence, and its decays; float32."""
        parts = x_TC.split(self.size, -1)
        gate_TC, decay_TC = (
            sigmoid(torch.cat([ref.multiply(x) for ref, x in zip(refs, parts, strict=True)], -1))
            for refs in self.gates
        )
        log_TC = -8.0 * decay_TC * softplus(self.recurrent_param.float())
        starts_T1 = (current_batch().positions_T == 0)[:, None]
        scale_TC = torch.sqrt(1 - torch.exp(2 * log_TC)).masked_fill(starts_T1, 1.0)
        return x_TC.float() * gate_TC * scale_TC, torch.exp(log_TC)


class RecurrentBlock(RecurrentLayer):
    """A convolution and a recurrence, times gelu of another product. Ranks split the heads."""

    def __init__(self, cfg: TextConfig):
        super().__init__()
        hidden, width = cfg.hidden_size, cfg.get("lru_width", cfg.hidden_size)
        num_heads = cfg.num_attention_heads
        heads, _, split = own_heads(num_heads, num_heads, width // num_heads)
        own = heads.times(width // num_heads)
        shares = (own,) if split else ()
        self.linear_y = Linear(hidden, own.length, bias=True, shares=shares)
        self.linear_x = Linear(hidden, own.length, bias=True, shares=shares)
        self.conv1d = CausalConv(own.length, cfg.conv1d_width, bias=True, activate=False, shares=shares)  # fmt: skip
        self.rg_lru = Recurrence(heads, width // num_heads)
        self.linear_out = Linear(width, hidden, bias=True, gathers=split)
        self.recurrence_shape = (own.length,)

    def forward(self, x_TD: Tensor, angles: Angles) -> Tensor:
        rows, (state, conv_state) = step_rows(), self.state
        y = self.linear_y(x_TD).float()
        y = y * sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # gelu, by tanh
        x_TC = self.conv1d(self.linear_x(x_TD), conv_state, rows)
        inputs_TC, decay_TC = self.rg_lru(x_TC)
        hidden_TC = decaying_sum(inputs_TC, decay_TC, state, rows)
        return self.linear_out((hidden_TC * y).to(x_TD.dtype))


class RecurrentGemma(Gemma):
    """RecurrentGemma 2B and 9B."""

    decoder_names: ClassVar = {"norm": "final_norm"}

    scales_after_lookup = True

    def embedding_scale(self, cfg: TextConfig) -> float | None:
        return float(torch.tensor(cfg.hidden_size**0.5, dtype=torch.bfloat16, device="cpu"))

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head:
        return Head(cfg.vocab_size, cfg.hidden_size, tied=tied, softcap=cfg.logits_soft_cap)

    def layer(self, i: int) -> nn.Module:
        cfg = self.cfg
        mlp = GatedMLP(cfg, bias=True, width=cfg.intermediate_size // 2)
        if cfg.block_types[i % len(cfg.block_types)] == "attention":
            window, bias = cfg.attention_window_size, cfg.attention_bias
            block: nn.Module = SelfAttention(cfg, i, qkv_bias=bias, o_bias=True, window=window)
        else:
            block = named(RecurrentBlock(cfg), conv1d="conv_1d")
        norms = ("temporal_pre_norm", None, "channel_pre_norm", None)
        layer = DecoderLayer(cfg, block, mlp, norms=norms, norm=self.norm)
        return named(layer, self_attn="temporal_block", mlp="mlp_block")
