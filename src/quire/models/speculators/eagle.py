"""EAGLE: one decoder layer, or a few, over the target's hidden states.

Sources: EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858), EAGLE-3 (2503.01840); the checkpoints of SafeAILab and of vLLM's
speculators.

Shape suffixes: T positions of a pass, S rows that draw, D features of a state, 2D = 2 * D, E features that the target gives.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.layers.decoder import SpeculatorParts
from quire.layers.decoder_layer import PRE_NORM, DecoderLayer, GatedMLP, SelfAttention
from quire.layers.linear import Linear
from quire.layers.native_parts import LayerParts
from quire.layers.norm import RMSNorm
from quire.layers.rotary import Angles
from quire.models.hf_config import TextConfig
from quire.models.speculators.base import Fusion, Speculator, SpeculatorDecoder


def attention(cfg: TextConfig, layer: int, **options: Any) -> SelfAttention:
    """The attention of Llama and its neighbours, with the biases and norms that the checkpoint has."""
    return SelfAttention(
        cfg, layer, qkv_bias=cfg.qkv_bias, o_bias=cfg.o_bias, qk_norm=cfg.qk_norm, window=cfg.window(layer), **options,
    )  # fmt: skip


class Eagle(Speculator):
    """EAGLE-1 and -2: the embedding and the state are projected to one vector; the first layer has no norm before it."""

    checkpoint_names: ClassVar = {"model": "", "fusion": ""}
    spellings = ((r"^model\.", ""),)

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        self.fusion = Fusion(cfg.hidden_size, ("", "", "fc"), bias=cfg.fc_bias)

    def decoder(self, cfg: TextConfig, max_length: int) -> SpeculatorDecoder:
        layers = (self.layer(i) for i in range(cfg.num_hidden_layers))
        return SpeculatorDecoder(cfg, layers, max_length)

    def layer(self, i: int) -> nn.Module:
        norms = (None, *PRE_NORM[1:]) if i == 0 else PRE_NORM
        mlp = GatedMLP(self.cfg, bias=self.cfg.mlp_bias)
        return DecoderLayer(self.cfg, attention(self.cfg, i), mlp, norms=norms)

    def forward(  # type: ignore[override]
        self, embeddings_TD: Tensor, positions_T: Tensor, states_TD: Tensor, step: int = 0
    ) -> Tensor:
        """See `Speculator`."""
        return self.model(self.fusion(embeddings_TD, states_TD), positions_T)

    def native(self) -> SpeculatorParts | None:
        """See `Speculator`."""
        if type(self) is not Eagle:
            return None
        fusion = self.fusion
        return self.parts(fusion.embedding_norm, fusion.state_norm, None, join=fusion.fc)


class Eagle3Layer(DecoderLayer):
    """The first layer: its attention reads the embedding and the state, each with a norm of its own."""

    input_layernorm: RMSNorm

    def __init__(self, cfg: TextConfig):
        wide = attention(cfg, 0, inputs=2 * cfg.hidden_size)
        super().__init__(cfg, wide, GatedMLP(cfg, bias=cfg.mlp_bias))
        self.hidden_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.norm_before_residual = cfg.get("norm_before_residual", False)

    def native(self) -> LayerParts | None:
        """See `LayerParts`."""
        parts = super().native()
        return None if parts is None else parts._replace(joined_attention=self.self_attn)

    def attention_sublayer(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """As of a `DecoderLayer`, from cat(embeddings, states), [T, 2D]."""
        embeddings_TD, states_TD = (part.contiguous() for part in x_TD.chunk(2, -1))
        normed_TD = self.hidden_norm(states_TD)
        x_T2D = torch.cat((self.input_layernorm(embeddings_TD), normed_TD), -1)
        residual_TD = normed_TD if self.norm_before_residual else states_TD
        return self.self_attn(x_T2D, angles), residual_TD


class Eagle3(Speculator):
    """EAGLE-3: reads the target after several layers, and has a smaller vocabulary.

    The next pass takes the state before the last norm; with `norm_output`, the state after it.
    """

    checkpoint_names: ClassVar = {"model": "", "head_norm": "norm"}
    spellings = (
        (r"^model\.", ""),
        (r"^midlayer\.(?=\d+\.)", "layers."),
        (r"^midlayer\.", "layers.0."),
    )

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        self.after = tuple(cfg.get("after", ()))
        size, eps = cfg.target_hidden_size, cfg.rms_norm_eps
        width = len(self.after) * size
        self.head_norm = None if cfg.get("norm_output") else RMSNorm(cfg.hidden_size, eps)
        self.fc = Linear(width, cfg.hidden_size, bias=cfg.fc_bias) if self.after else None
        self.input_norm = RMSNorm(width, eps) if cfg.get("norm_before_fc") else None
        norms = len(self.after) if cfg.get("fc_norm") else 0
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(norms))

    def decoder(self, cfg: TextConfig, max_length: int) -> SpeculatorDecoder:
        norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps) if cfg.get("norm_output") else None
        layers = (self.layer(i) for i in range(cfg.num_hidden_layers))
        return SpeculatorDecoder(cfg, layers, max_length, norm=norm)

    def layer(self, i: int) -> nn.Module:
        if i == 0:
            return Eagle3Layer(self.cfg)
        mlp = GatedMLP(self.cfg, bias=self.cfg.mlp_bias)
        return DecoderLayer(self.cfg, attention(self.cfg, i), mlp)

    def native(self) -> SpeculatorParts | None:
        """See `Speculator`."""
        if type(self) is not Eagle3 or self.input_norm is not None or self.fc_norm:
            return None
        first: Any = self.model.layers[0]
        return self.parts(
            first.input_layernorm, first.hidden_norm, self.head_norm or self.model.norm, state_projection=self.fc,
            normed_residual=first.norm_before_residual, passes_sum=self.head_norm is not None,
        )  # fmt: skip

    def target_states(self, states_TE: Tensor) -> Tensor:
        """See `Speculator`."""
        if self.fc is None:
            return states_TE
        if self.input_norm is not None:
            states_TE = self.input_norm(states_TE)
        if self.fc_norm:
            parts = states_TE.chunk(len(self.fc_norm), -1)
            normed = [norm(part.contiguous()) for norm, part in zip(self.fc_norm, parts, strict=True)]  # fmt: skip
            states_TE = torch.cat(normed, -1)
        return self.fc(states_TE)

    def forward(  # type: ignore[override]
        self, embeddings_TD: Tensor, positions_T: Tensor, states_TD: Tensor, step: int = 0
    ) -> Tensor:
        """See `Speculator`."""
        return self.model(torch.cat((embeddings_TD, states_TD), -1), positions_T)

    def logits(self, states_SD: Tensor, step: int = 0) -> Tensor:
        """See `Speculator`."""
        return super().logits(states_SD if self.head_norm is None else self.head_norm(states_SD))
