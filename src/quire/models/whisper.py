"""Whisper and its distilled forms: an encoder of sound, and a decoder whose layers attend to the encoder's states.

The encoder is a part of the model that its hook calls (`features/transcription`), once for each window of sound; the decoder
keeps keys and values of the states as `layers/cross_attention.py` says.
Source: arXiv 2212.04356.

Shape suffixes: T tokens of this step, S encoder states, F frames of a spectrogram, M mel bins, H heads, K heads of keys, D features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.forward_context import adapter_context, forward_context, packed_batch
from quire.layers.cross_attention import CrossAttention
from quire.layers.decoder import Decoder
from quire.layers.decoder_layer import DecoderLayer, SelfAttention, normed_sum
from quire.layers.embedding import Embedding
from quire.layers.encoder import EncoderLayer, EncoderStack, UngatedMLP
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm
from quire.layers.rotary import Angles
from quire.layers.weight_slots import Layer
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig
from quire.ops.reference import activate
from quire.parallel.ranks import head_slices

NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "out_proj")
MLP_NAMES = ("fc1", "fc2")


class Convolution(Layer):
    """A convolution over time with 3 taps; the ends are padded with zeros."""

    weight: Tensor
    bias: Tensor

    def __init__(self, num_in: int, num_out: int, stride: int = 1):
        super().__init__()
        self.stride = stride
        self.new("weight", num_out, num_in, 3)
        self.new("bias", num_out)

    def forward(self, x_DF: Tensor) -> Tensor:
        y_DF: Tensor = F.conv1d(x_DF[None], self.weight, self.bias, self.stride, padding=1)[0]
        return y_DF


class WhisperEncoder(EncoderStack):
    """Turns the log-mel spectrogram of a window into states, half as many as it has frames."""

    def __init__(self, cfg: TextConfig):
        super().__init__()
        self.checkpoint_names = {"final_norm": "layer_norm"}
        size, self.length, self.act = cfg.hidden_size, cfg.max_source_positions, cfg.hidden_act
        self.conv1 = Convolution(cfg.num_mel_bins, size)
        self.conv2 = Convolution(size, size, stride=2)
        self.embed_positions = Embedding(self.length, size)
        heads = cfg.encoder_attention_heads
        own = {
            "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": size // heads,
            "intermediate_size": cfg.encoder_ffn_dim,
        }  # fmt: skip
        inner = TextConfig({**cfg.values, **own})
        self.layers = nn.ModuleList(self._layer(inner, i) for i in range(cfg.encoder_layers))
        self.final_norm = LayerNorm(size, eps=cfg.rms_norm_eps, bias=True)
        self.rotaries = None

    def _layer(self, cfg: TextConfig, i: int) -> EncoderLayer:
        norm = partial(LayerNorm, cfg.hidden_size, eps=cfg.rms_norm_eps, bias=True)
        attention = SelfAttention(
            cfg, i, qkv_bias=True, o_bias=True, rope=False, causal=False, names=NAMES
        )
        names = ("self_attn", "self_attn_layer_norm", "", "final_layer_norm")
        mlp = UngatedMLP(cfg, names=MLP_NAMES)
        return EncoderLayer(attention, norm(), mlp, norm(), names=names, pre_norm=True)

    @torch.inference_mode()
    def forward(self, mel_MF: Tensor) -> Tensor:
        """states_SD, for F = 2 S frames. Not inside a forward pass of the decoder.

        Raises:
            ValueError: another number of frames, or of mel bins.
        """
        table_SD = self.embed_positions.weight
        want = (self.conv1.weight.shape[1], 2 * self.length)
        if tuple(mel_MF.shape) != want:
            raise ValueError(
                f"a spectrogram of shape {tuple(mel_MF.shape)}; the encoder takes {want}"
            )
        x_DF = activate(self.conv1(mel_MF.to(table_SD.dtype)), self.act)
        x_DS = activate(self.conv2(x_DF), self.act)
        with forward_context(packed_batch([self.length], table_SD.device)):
            return self.run(x_DS.T + table_SD, torch.arange(self.length, device=table_SD.device))


class EncoderAttention(nn.Module):
    """Attention of the decoder's tokens to the encoder's states."""

    def __init__(self, cfg: TextConfig, layer: int):
        super().__init__()
        self.checkpoint_names = {"o_proj": "out_proj"}
        heads, size = cfg.num_attention_heads, cfg.head_dim
        shares = head_slices(heads, heads)
        self.heads = shares[0].length if shares else heads
        own = [share.times(size) for share in shares]
        width = self.heads * size
        self.q = Linear(cfg.hidden_size, {"q_proj": width}, bias=True, shares=own[:1])
        parts = {"k_proj": width, "v_proj": width}
        self.kv = Linear(cfg.hidden_size, parts, bias=True, shares=[*own[1:], *own[1:]])
        self.o_proj = Linear(heads * size, cfg.hidden_size, bias=True, gathers=bool(shares))
        self.recorder: Any = None  # of attention (`features/transcription/alignment.py`)
        self.attn = CrossAttention(
            self.heads, self.heads, size, max_encoder_len=cfg.max_source_positions, layer_index=layer
        )  # fmt: skip

    def forward(self, x_TD: Tensor) -> Tensor:
        q_THD = self.q(x_TD).unflatten(-1, (self.heads, -1))
        k_SKD = v_SKD = None
        if (states_SD := self.attn.new_states()) is not None:
            with adapter_context(self.attn.adapters_of_states()):
                both = self.kv(states_SD).unflatten(-1, (2, self.heads, -1))
            k_SKD, v_SKD = both.unbind(1)
        if self.recorder is not None:
            self.recorder.record(q_THD, k_SKD)
        return self.o_proj(self.attn(q_THD, k_SKD, v_SKD).flatten(-2))


class WhisperLayer(DecoderLayer):
    """A decoder layer with attention to the encoder's states between attention and MLP."""

    checkpoint_names = {"mlp": ""}  # noqa: RUF012

    def __init__(self, cfg: TextConfig, i: int, norm: Any):
        attention = SelfAttention(cfg, i, qkv_bias=True, o_bias=True, rope=False, names=NAMES)
        mlp = UngatedMLP(cfg, names=MLP_NAMES, splits=True)
        norms = ("self_attn_layer_norm", None, "final_layer_norm", None)
        super().__init__(cfg, attention, mlp, norms=norms, norm=norm)
        self.encoder_attn_layer_norm = norm(cfg.hidden_size)
        self.encoder_attn = EncoderAttention(cfg, i)

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention_sublayer(x_TD, residual_TD, angles)
        x_TD, residual_TD = normed_sum(self.encoder_attn_layer_norm, x_TD, residual_TD)
        return self.mlp_sublayer(self.encoder_attn(x_TD), residual_TD)


class WhisperDecoder(Decoder):
    """A decoder with a table of positions."""

    def __init__(self, cfg: TextConfig, *args: Any, **options: Any):
        super().__init__(cfg, *args, **options)
        first = self.stage.is_first
        length, size = cfg.max_position_embeddings, cfg.hidden_size
        self.embed_positions = Embedding(length, size) if first else None

    def forward(self, embeddings_TD: Tensor, positions: Tensor) -> Tensor:
        if self.embed_positions is not None:
            embeddings_TD = embeddings_TD + self.embed_positions(positions)
        return super().forward(embeddings_TD, positions)


class Whisper(CausalLM):
    """Whisper. `encoder` is called by a hook."""

    checkpoint_names = {"model": "model.decoder", "encoder": "model.encoder"}  # noqa: RUF012
    decoder_names = {"norm": "layer_norm"}  # noqa: RUF012
    decoder_class = WhisperDecoder
    capturable = False

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        self.encoder = WhisperEncoder(cfg)

    def norm(self, size: int) -> LayerNorm:
        return LayerNorm(size, eps=self.cfg.rms_norm_eps, bias=True)

    def embedding_scale(self, cfg: TextConfig) -> float | None:
        return math.sqrt(cfg.hidden_size) if cfg.get("scale_embedding") else None

    def layer(self, i: int) -> nn.Module:
        return WhisperLayer(self.cfg, i, self.norm)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Keys have no bias in checkpoints: zeros."""
        if name.startswith(("encoder.", "decoder.")):  # saved without a head
            name = f"model.{name}"
        if name.endswith("k_proj.weight"):
            yield name.removesuffix("weight") + "bias", tensor.new_zeros(tensor.shape[0])
        yield name, tensor

    def ignores(self, name: str) -> bool:
        """The head is the embeddings' table; some checkpoints store it twice. Positions belong to the first stage."""
        return name in ("proj_out.weight", "model.decoder.embed_positions.weight")
