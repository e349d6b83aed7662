"""Llama and the families that differ from it in biases, windows, norms on heads and multipliers.

To add a family whose config.json says all that differs, map its architecture to one of these in `families.toml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor, nn

from quire.layers.decoder_layer import DecoderLayer, GatedMLP, QueryScale, SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig


class Llama(CausalLM):
    """Llama 1 to 3, and the many models that use its architecture (Yi, TinyLlama, SmolLM, InternLM 3, ...)."""

    def layer(self, i: int) -> nn.Module:
        bias = self.cfg.attention_bias
        attention = SelfAttention(self.cfg, i, qkv_bias=bias, o_bias=bias)
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg, bias=self.cfg.mlp_bias))


class SeedOss(CausalLM):
    """Biases of the output projection are configured by themselves."""

    def layer(self, i: int) -> nn.Module:
        cfg = self.cfg
        attention = SelfAttention(
            cfg, i, qkv_bias=cfg.attention_bias, o_bias=cfg.attention_out_bias
        )
        return DecoderLayer(cfg, attention, GatedMLP(cfg, bias=cfg.mlp_bias))


class Ernie(CausalLM):
    """ERNIE 4.5, dense: adjacent features are rotated in pairs."""

    def layer(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.use_bias
        attention = SelfAttention(cfg, i, qkv_bias=bias, o_bias=bias, interleaved=True)
        return DecoderLayer(cfg, attention, GatedMLP(cfg, bias=bias))


class SmolLM3(CausalLM):
    """No positions in every fourth layer."""

    def layer(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        turned = cfg.get("no_rope_layers")  # 1: the layer has positions
        rope = bool(turned[i] if turned else (i + 1) % cfg.no_rope_layer_interval)
        window = cfg.window(i) if cfg.use_sliding_window else None
        attention = SelfAttention(cfg, i, qkv_bias=bias, o_bias=bias, rope=rope, window=window)
        return DecoderLayer(cfg, attention, GatedMLP(cfg, bias=cfg.mlp_bias))


class Granite(CausalLM):
    """Granite 3 and 4, dense: multipliers of embeddings, scores, residuals and logits."""

    def layer(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        scale = cfg.attention_multiplier
        attention = SelfAttention(cfg, i, qkv_bias=bias, o_bias=bias, scale=scale)
        mlp = GatedMLP(cfg, bias=cfg.mlp_bias)
        return DecoderLayer(cfg, attention, mlp, residual_scale=cfg.residual_multiplier)

    scales_after_lookup = True

    def embedding_scale(self, cfg: TextConfig) -> float | None:
        return float(cfg.embedding_multiplier)

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head:
        return Head(cfg.vocab_size, cfg.hidden_size, tied=tied, scale=1 / cfg.logits_scaling)


class Mistral(CausalLM):
    """A sliding window in all layers, if the checkpoint has one (Mistral 7B v0.1, Phi-3)."""

    def layer(self, i: int) -> nn.Module:
        attention = SelfAttention(self.cfg, i, window=self.cfg.get("sliding_window"))
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg))


class Ministral3(CausalLM):
    """As Mistral, with queries that grow with the position."""

    def layer(self, i: int) -> nn.Module:
        cfg, rope = self.cfg, self.cfg.rope(i)
        beta, length = rope.get("llama_4_scaling_beta"), rope["original_max_position_embeddings"]
        query_scale = QueryScale(beta, length) if beta else None
        window = cfg.get("sliding_window")
        attention = SelfAttention(cfg, i, window=window, query_scale=query_scale)
        return DecoderLayer(cfg, attention, GatedMLP(cfg))


class Qwen2(CausalLM):
    """Qwen 2 and 2.5: biases on queries, keys and values; some checkpoints have a window in the upper layers."""

    def layer(self, i: int) -> nn.Module:
        attention = SelfAttention(self.cfg, i, qkv_bias=True, window=self.cfg.window(i))
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg))


class Qwen3(CausalLM):
    """A norm on each head's query and key, an explicit head size, no biases unless config.json sets them."""

    def layer(self, i: int) -> nn.Module:
        bias = self.cfg.attention_bias
        attention = SelfAttention(
            self.cfg, i, qkv_bias=bias, o_bias=bias, qk_norm=True, window=self.cfg.window(i)
        )
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg))


class InternLM2(CausalLM):
    """InternLM 2: Llama under other names; the queries, keys and values of a group of heads are side by side."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "tok_embeddings.": "embed_tokens.", "attention.wo.": "self_attn.o_proj.", "attention_norm.": "input_layernorm.",
        "ffn_norm.": "post_attention_layernorm.", "feed_forward.w1.": "mlp.gate_proj.", "feed_forward.w3.": "mlp.up_proj.",
        "feed_forward.w2.": "mlp.down_proj.", "output.": "lm_head.",
    }  # fmt: skip

    def layer(self, i: int) -> nn.Module:
        bias = self.cfg.get("bias", True)
        attention = SelfAttention(self.cfg, i, qkv_bias=bias, o_bias=bias)
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg))

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this model that a tensor of a checkpoint holds, by their names here."""
        if ".wqkv." not in name:
            old = next((old for old in self.NAMES if f".{old}" in f".{name}"), "")
            yield name.replace(old, self.NAMES[old]) if old else name, tensor
            return
        cfg = self.cfg
        group = cfg.num_attention_heads // cfg.num_key_value_heads
        rows = tensor.unflatten(0, (cfg.num_key_value_heads, group + 2, cfg.head_dim))
        for part, heads in (("q", slice(group)), ("k", slice(group, group + 1)), ("v", slice(group + 1, None))):  # fmt: skip
            yield (
                name.replace("attention.wqkv", f"self_attn.{part}_proj"),
                rows[:, heads].flatten(0, 2),
            )
