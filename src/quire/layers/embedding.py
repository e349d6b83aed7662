"""Embedding and LM head: tokens to vectors, vectors to logits.

Shape suffixes: T tokens, S tokens that need logits, V vocabulary, D features, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.forward_context import current_adapters
from quire.layers.prepared_weight import PreparedWeight
from quire.layers.weight_slots import Layer
from quire.layers.weights import CheckpointFormat, WeightRef
from quire.ops.lora import LoraTable, lora_lookup
from quire.ops.reference import embedding, scale_logits
from quire.parallel.ranks import OutputSlice, current_ranks, output_slices


class Embedding(Layer):
    """Table lookup; `scale` is rounded to the table's dtype and multiplies the result (Gemma).

    Args:
        splits: whether ranks may have a part of the words each, if the table is large.
    """

    weight: Tensor
    lora: LoraTable | None = None
    """As of a `WeightRef`."""

    def __init__(
        self, num_words: int, size: int, *, scale: float | None = None, splits: bool = False
    ):
        super().__init__()
        self.scale = scale
        self.num_in, self.num_out = num_words, size
        self.packed: PreparedWeight | None = (
            None  # replaces `weight` if the LM head packed the table
        )
        self.table: WeightRef | None = None  # for a table that no head shares, in blocks of a file
        self.shares = output_slices(num_words) if splits else ()
        self.ranks = current_ranks() if self.shares else None
        own = self.shares[0] if self.shares else OutputSlice(0, num_words, num_words)
        self.first, self.words = own.start, own.length
        self.own_shares["weight"] = self.shares
        self.new("weight", self.words, size)

    def weights(self) -> Iterable[WeightRef]:
        return () if self.table is None else (self.table,)

    def forward(self, ids_T: Tensor) -> Tensor:
        x_TD = self._rows(ids_T) if self.ranks is None else self._rows_of_ranks(ids_T)
        if self.lora is not None and (numbers_T := current_adapters(ids_T)) is not None:
            x_TD = lora_lookup(ids_T, x_TD, numbers_T, self.lora)
        return x_TD if self.scale is None else x_TD * x_TD.new_tensor(self.scale)

    def _rows(self, ids_T: Tensor) -> Tensor:
        packed = self.packed
        if packed is None or packed.rows is None:
            return embedding(ids_T, self.weight)
        return packed.rows(ids_T)

    def _rows_of_ranks(self, ids_T: Tensor) -> Tensor:
        """Each rank looks up its words, and another in the place of each word that it has not; all take each row from the
        rank that has its word."""
        own_TD = self._rows((ids_T - self.first).clamp(0, self.words - 1))
        all_TRD = self.ranks.gather(own_TD).unflatten(1, (self.ranks.size, -1))  # type: ignore[union-attr]
        return all_TRD[torch.arange(len(ids_T)), ids_T // self.words]


class Head(Layer):
    """LM head. With `tied`, it uses the embedding's table, which the checkpoint stores once.

    Logits are multiplied by `scale`, then become softcap * tanh(logits / softcap).
    """

    may_defer = True

    def __init__(
        self,
        num_words: int,
        size: int,
        *,
        tied: Embedding | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        bias: bool = False,
    ):
        super().__init__()
        self.scale, self.softcap = scale, softcap
        shares = output_slices(num_words) if tied is None else tied.shares
        num_words = shares[0].length if shares else num_words
        layer = self if tied is None else tied
        self.ref = TableRef(layer, size, num_words, bias=bias, shares=shares)
        self.ref.output_ranks = current_ranks() if shares else None

    def weights(self) -> Iterable[WeightRef]:
        return (self.ref,)

    def forward(self, x_SD: Tensor) -> Tensor:
        """logits_SV"""
        y_SV = self.ref.multiply(x_SD)
        if self.scale == 1.0 and self.softcap is None:
            return y_SV
        return scale_logits(y_SV, self.scale, self.softcap)


class TableRef(WeightRef):
    """The weight of a head, or an embedding's own table. The table of an embedding stays, unless the prepared weight gives its rows as well."""

    is_head = True

    def use(self, form: CheckpointFormat) -> None:
        super().use(form)
        if self.shares and isinstance(self.layer, Embedding):
            for name, stored in self.stored.items():
                self.layer.own_shares[name] = stored.shares(self.shares)

    def install(self, prepared: PreparedWeight) -> None:
        if isinstance(self.layer, Embedding):
            if prepared.rows is None:
                self.prepared = prepared
                return
            self.layer.packed = prepared
        super().install(prepared)
