"""The encoders of embedding and classification models. No KV cache: a prompt is one step.

A family is a subclass that passes names of checkpoints and options of layers.

Shape suffixes: T tokens, S positions, D features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.errors import ConfigError, Unsupported
from quire.layers.attention import Attention
from quire.layers.decoder_layer import GatedMLP, SelfAttention
from quire.layers.encoder import Encoder, EncoderLayer, EncoderTables, UngatedMLP
from quire.layers.norm import LayerNorm
from quire.layers.rotary import LayerRotaries
from quire.models.base import LanguageModel
from quire.models.hf_config import TextConfig

BERT_NAMES = {
    "embed_tokens": "embeddings.word_embeddings",
    "position_table": "embeddings.position_embeddings",
    "type_table": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "layers": "encoder.layer",
}


class EncoderModel(LanguageModel):
    """An encoder: `forward` gives the hidden states of all tokens.

    Class attributes:
        prefixes: of names in checkpoints of the model with a head; a checkpoint may leave them out.
        names: see `Encoder`. layer_names: see `EncoderLayer`. attention_names: see `SelfAttention`.
        mlp_names: see `UngatedMLP`, or `GatedMLP` if there are four.
    """

    prefixes: tuple[str, ...] = ("model.",)
    names: ClassVar[Mapping[str, str]] = BERT_NAMES
    layer_names = ("attention", "attention.output.LayerNorm", "", "output.LayerNorm")
    attention_names = ("self.query", "self.key", "self.value", "self.qkv", "output.dense")
    mlp_names: tuple[str, ...] = ("intermediate.dense", "output.dense")
    checkpoint_names: Mapping[str, str] = {"model": ""}

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__()
        self.cfg = cfg
        if cfg.get("position_embedding_type", "absolute") not in ("absolute", "rope", "rotary"):
            what = f"position_embedding_type={cfg.position_embedding_type!r} of config.json"
            raise ConfigError(f"{what} is not supported; choose a model with absolute positions")
        layers, length = cfg.num_hidden_layers, max_length or cfg.max_position_embeddings
        rotaries = None
        if self.rotates:
            ropes = [self.rope(i) for i in range(layers)]
            rotaries = LayerRotaries(cfg.head_dim, ropes, length)
        self.model = Encoder(
            self.tables(), cfg.hidden_size, layers, self.layer, norm=self.norm(),
            final_norm=self.final_norm(), rotaries=rotaries, names=self.names,
        )  # fmt: skip

    # -- what differs between families
    rotates = False

    def tables(self) -> EncoderTables:
        cfg = self.cfg
        return EncoderTables(
            cfg.vocab_size, cfg.max_position_embeddings, 0, cfg.get("type_vocab_size", 0)
        )

    def norm(self) -> LayerNorm:
        eps = self.cfg.get("layer_norm_epsilon") or self.cfg.layer_norm_eps
        return LayerNorm(self.cfg.hidden_size, eps=eps, bias=True)

    def final_norm(self) -> LayerNorm | None:
        return None

    def rope(self, i: int) -> dict[str, Any]:
        """The rotary parameters of layer i."""
        return self.cfg.rope(i)

    def attention(self, i: int, *, bias: bool = True, window: int | None = None) -> SelfAttention:
        return SelfAttention(
            self.cfg, i, qkv_bias=bias, o_bias=bias, window=window, rope=self.rotates, causal=False,
            names=self.attention_names,
        )  # fmt: skip

    def mlp(self) -> nn.Module:
        return UngatedMLP(self.cfg, names=self.mlp_names)

    def layer(self, i: int) -> nn.Module:
        """Layer i of this family."""
        norms = self.norm(), self.norm()
        return EncoderLayer(
            self.attention(i), norms[0], self.mlp(), norms[1], names=self.layer_names
        )

    # -- the interface
    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this model that a tensor of a checkpoint holds, by their names here."""
        prefix = next((each for each in self.prefixes if name.startswith(each)), "")
        name = name.removeprefix(prefix)
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            name = name.removesuffix(old) + new if name.endswith(old) else name
        yield name, tensor

    def ignores(self, name: str) -> bool:
        """See `CausalLM.ignores`. Heads that this model does not have are only named in the log."""
        return name.endswith(("position_ids", "inv_freq"))

    @property
    def vocab_size(self) -> int:
        return int(self.cfg.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """embeddings_TD"""
        return self.model.embed_tokens(token_ids_T)

    def forward(self, embeddings_TD: Tensor, positions: Tensor) -> Tensor:
        """hidden_TD, after the last norm."""
        return self.model(embeddings_TD, positions)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Raises Unsupported: the model generates no tokens."""
        raise Unsupported("logits of an encoder", "use --runner pooling")

    def attention_layers(self) -> list[Attention]:
        """None: there is no KV cache."""
        return []


class Bert(EncoderModel):
    """BERT and models with its layers: norms after attention and MLP, learned positions, token types."""

    prefixes = ("bert.",)


class Roberta(EncoderModel):
    """RoBERTa and XLM-R: the rows of positions begin after the row of padding."""

    prefixes = ("roberta.",)

    def tables(self) -> EncoderTables:
        return super().tables()._replace(offset=self.cfg.get("pad_token_id", 1) + 1)


class DistilBert(EncoderModel):
    """DistilBERT: BERT without token types, under other names."""

    prefixes = ("distilbert.",)
    names: ClassVar[Mapping[str, str]] = {**BERT_NAMES, "layers": "transformer.layer"}
    layer_names = ("attention", "sa_layer_norm", "ffn", "output_layer_norm")
    attention_names = ("q_lin", "k_lin", "v_lin", "qkv_lin", "out_lin")
    mlp_names = ("lin1", "lin2")

    def tables(self) -> EncoderTables:
        return super().tables()._replace(types=0)

    def norm(self) -> LayerNorm:
        return LayerNorm(self.cfg.hidden_size, eps=1e-12, bias=True)


class RopeBert(EncoderModel):
    """BERT with rotary positions (jina-embeddings-v3)."""

    prefixes: tuple[str, ...] = ("roberta.",)
    rotates = True
    names: ClassVar[Mapping[str, str]] = {
        **BERT_NAMES,
        "embedding_norm": "emb_ln",
        "layers": "encoder.layers",
    }
    layer_names = ("mixer", "norm1", "mlp", "norm2")
    attention_names = ("q_proj", "k_proj", "v_proj", "Wqkv", "out_proj")
    mlp_names: tuple[str, ...] = ("fc1", "fc2")

    def tables(self) -> EncoderTables:
        return super().tables()._replace(positions=0)


class NomicBert(RopeBert):
    """Nomic's BERT: a gated MLP, no biases in layers."""

    prefixes = ("nomic_bert.", "bert.")
    layer_names = ("attn", "norm1", "mlp", "norm2")
    mlp_names = ("fc12", "fc11", "fc12_fc11", "fc2")

    def rope(self, i: int) -> dict[str, Any]:
        """Older files call the base otherwise."""
        base = self.cfg.get("rotary_emb_base")
        return {**self.cfg.rope(i), **({"rope_theta": base} if base else {})}

    def attention(self, i: int, *, bias: bool = False, window: int | None = None) -> SelfAttention:
        return super().attention(i, bias=bias, window=window)

    def mlp(self) -> nn.Module:
        act = {"swiglu": "silu", "geglu": "gelu"}.get(self.cfg.hidden_act, self.cfg.hidden_act)
        return GatedMLP(self.cfg, names=self.mlp_names, act=act)


class Gte(RopeBert):
    """GTE v1.5 and multilingual ("new"): a gated MLP, whose last product has a bias."""

    prefixes = ("new.", "gte.")
    names: ClassVar[Mapping[str, str]] = BERT_NAMES
    layer_names = ("attention", "attn_ln", "mlp", "mlp_ln")
    attention_names = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")

    def mlp(self) -> nn.Module:
        return GatedMLP(self.cfg, down_bias=True)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The halves of `up_gate_proj` are in the other order than here."""
        for own, each in super().checkpoint_tensors(name, tensor):
            if ".up_gate_proj." not in own:
                yield own, each
                continue
            for part, half in zip(("up_proj", "gate_proj"), each.chunk(2), strict=True):
                yield own.replace("up_gate_proj", part), half


class ModernBert(EncoderModel):
    """ModernBERT: norms before attention and MLP, rotary positions, windows in two of three layers."""

    rotates = True
    names: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "embeddings.tok_embeddings",
        "embedding_norm": "embeddings.norm",
    }
    layer_names = ("attn", "attn_norm", "mlp", "mlp_norm")
    attention_names = ("q_proj", "k_proj", "v_proj", "Wqkv", "Wo")
    mlp_names = ("gate_proj", "up_proj", "Wi", "Wo")

    def tables(self) -> EncoderTables:
        return EncoderTables(self.cfg.vocab_size)

    def norm(self) -> LayerNorm:
        cfg = self.cfg
        return LayerNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, bias=cfg.norm_bias)

    def final_norm(self) -> LayerNorm | None:
        return self.norm()

    def is_global(self, i: int) -> bool:
        """Whether layer i has no window."""
        if types := self.cfg.get("layer_types"):
            return bool(types[i] == "full_attention")
        return i % self.cfg.global_attn_every_n_layers == 0

    def rope(self, i: int) -> dict[str, Any]:
        """Older files give a theta for each kind of layer."""
        cfg, is_global = self.cfg, self.is_global(i)
        parameters = cfg.rope_parameters
        if "rope_type" not in parameters:
            return dict(parameters["full_attention" if is_global else "sliding_attention"])
        return {
            **parameters,
            "rope_theta": cfg.global_rope_theta if is_global else cfg.local_rope_theta,
        }

    def layer(self, i: int) -> nn.Module:
        cfg = self.cfg
        window = None if self.is_global(i) else cfg.local_attention // 2 + 1
        attention = self.attention(i, bias=cfg.attention_bias, window=window)
        norm = self.norm() if i else None
        mlp = GatedMLP(cfg, bias=cfg.mlp_bias, names=self.mlp_names)
        return EncoderLayer(
            attention, norm, mlp, self.norm(), names=self.layer_names, pre_norm=True
        )
