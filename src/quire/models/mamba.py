"""Mamba-1 and Mamba-2 alone: one recurrent layer after the other, without attention."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import nn

from quire.layers.decoder_layer import MixerLayer
from quire.layers.recurrent import Mamba2Mixer, Mamba2Sizes, MambaMixer
from quire.models.base import CausalLM

BACKBONE = {"embed_tokens": "embeddings", "norm": "norm_f"}


class Mamba(CausalLM):
    """Mamba-1, and Falcon-Mamba, which norms the step, B and C without weights."""

    checkpoint_names: ClassVar = {"model": "backbone"}
    decoder_names: ClassVar = BACKBONE

    def layer(self, i: int) -> nn.Module:
        return MixerLayer(self.mixer(), self.norm(self.cfg.hidden_size))

    def mixer(self) -> nn.Module:
        """The recurrent layer."""
        cfg = self.cfg
        inner = cfg.get("intermediate_size") or int(cfg.expand * cfg.hidden_size)
        rank = cfg.get("time_step_rank", "auto")
        return MambaMixer(
            *(cfg.hidden_size, inner, cfg.get("state_size", 16)),
            math.ceil(cfg.hidden_size / 16) if rank == "auto" else rank,
            cfg.get("conv_kernel", 4),
            bias=cfg.get("use_bias", False),
            conv_bias=cfg.get("use_conv_bias", True),
            norm_eps=cfg.get("mixer_rms_eps"),
        )


class Mamba2(Mamba):
    """Mamba-2, as Transformers stores it."""

    def mixer(self) -> nn.Module:
        cfg = self.cfg
        sizes = Mamba2Sizes(
            *(cfg.num_heads, cfg.head_dim, cfg.n_groups, cfg.state_size, cfg.conv_kernel)
        )
        return Mamba2Mixer(
            *(cfg.hidden_size, sizes, cfg.rms_norm_eps),
            bias=cfg.use_bias,
            conv_bias=cfg.use_conv_bias,
            limits=cfg.get("time_step_limit"),
        )
