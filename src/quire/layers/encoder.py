"""Encoder: embeddings, layers and norms of an embedding or classification model. Attention is bidirectional in each prompt,
without a KV cache.

Knows the order of these parts. Does not know families: these pass names and options.

Shape suffixes: T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.forward_context import current_batch
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.rotary import Angles, LayerRotaries
from quire.ops.reference import UNGATED
from quire.parallel.ranks import output_slices

ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
"""Other names in config.json."""


class UngatedMLP(nn.Module):
    """down(act(up(x))).

    Args:
        names: of up and down in checkpoints.
        splits: whether ranks may compute a part of the inner features each.
    """

    def __init__(
        self,
        cfg: Any,
        *,
        bias: bool = True,
        names: Sequence[str] = ("up_proj", "down_proj"),
        splits: bool = False,
    ):
        super().__init__()
        self.checkpoint_names = dict(zip(("up_proj", "down_proj"), names, strict=True))
        act = ACTIVATIONS.get(cfg.hidden_act, cfg.hidden_act)
        if act not in UNGATED:
            raise ConfigError(
                f"hidden_act={act!r} is not supported; choose from {', '.join(UNGATED)}"
            )
        inner = cfg.intermediate_size
        shares = output_slices(inner) if splits else ()
        own = shares[0].length if shares else inner
        self.up_proj = Linear(cfg.hidden_size, own, bias=bias, after=act, shares=shares)
        self.down_proj = Linear(inner, cfg.hidden_size, bias=bias, gathers=bool(shares))

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
            raise RuntimeError("a layer with norms after its sublayers has both")
        x_TD = self.attention_norm.add(self.self_attn(x_TD, angles), x_TD)[0]
        return self.mlp_norm.add(self.mlp(x_TD), x_TD)[0]


class EncoderTables(NamedTuple):
    """The rows of the tables of an encoder's embeddings; 0: there is no such table.

    `offset`: position p is row p + offset.
    """

    words: int
    positions: int = 0
    offset: int = 0
    types: int = 0


class EncoderStack(nn.Module):
    """Layers, and the norm after them, if there is one.

    `rotaries`: the rotary embeddings of the layers, if there are.
    """

    layers: nn.ModuleList
    final_norm: Norm | None  # (a default here would hide the module)
    rotaries: LayerRotaries | None
    fused: Any = None  # what computes `stack` in one kernel call, with the same results

    def run(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """The layers and the last norm. It may overwrite x."""
        hidden_TD: Tensor = (self.stack if self.fused is None else self.fused.run)(
            x_TD, positions_T
        )
        return hidden_TD

    def stack(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """As `run`, layer by layer."""
        angles: list[Any] = [()] * len(self.layers)
        if self.rotaries is not None:
            angles = self.rotaries(positions_T)
        for layer, each in zip(self.layers, angles, strict=True):
            x_TD = layer(x_TD, each)
        return x_TD if self.final_norm is None else self.final_norm(x_TD)


class Encoder(EncoderStack):
    """Turns embeddings and positions into hidden states.

    Args:
        layer: makes layer i. norm: of the embeddings. final_norm: after the last layer, if there is one.
        rotaries: the rotary embeddings of the layers, if there are.
        names: of embed_tokens, position_table, type_table, embedding_norm, layers and final_norm in checkpoints.
    """

    def __init__(
        self,
        tables: EncoderTables,
        size: int,
        num_layers: int,
        layer: Callable[[int], nn.Module],
        *,
        norm: Norm,
        final_norm: Norm | None = None,
        rotaries: LayerRotaries | None = None,
        names: Mapping[str, str],
    ):
        super().__init__()
        self.checkpoint_names, self.offset = names, tables.offset
        self.embed_tokens = Embedding(tables.words, size)
        self.position_table = Embedding(tables.positions, size) if tables.positions else None
        self.type_table = Embedding(tables.types, size) if tables.types else None
        self.embedding_norm, self.final_norm = norm, final_norm
        self.layers = nn.ModuleList(layer(i) for i in range(num_layers))
        self.rotaries = rotaries

    def forward(self, embeddings_TD: Tensor, positions_T: Tensor) -> Tensor:
        """hidden_TD; token types are `extras["token_types_T"]` of the batch, or 0."""
        x_TD = embeddings_TD
        if self.type_table is not None:
            types_T = current_batch().extras.get("token_types_T")
            rows = self.type_table.weight[0] if types_T is None else self.type_table(types_T)
            x_TD = x_TD + rows
        if self.position_table is not None:
            x_TD = x_TD + self.position_table(positions_T + self.offset)
        x_TD = self.embedding_norm(x_TD)
        return self.run(x_TD, positions_T)
