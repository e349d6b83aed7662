"""Embedding and LM head: tokens to vectors, vectors to logits.

Shape suffixes: T tokens, S tokens that need logits, V vocabulary, D features.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire.forward_context import current_adapters
from quire.layers.weight_slots import Layer
from quire.layers.weights import PreparedWeight, WeightRef
from quire.ops.lora import LoraTable, lora_lookup
from quire.ops.reference import embedding, scale_logits
from quire.parallel.ranks import current_ranks, shared_outputs


class Embedding(Layer):
    """Table lookup; `scale` is rounded to the table's dtype and multiplies the result (Gemma)."""

    weight: Tensor
    lora: LoraTable | None = None
    """As of a `WeightRef`."""

    def __init__(self, num_words: int, size: int, *, scale: float | None = None):
        super().__init__()
        self.scale = scale
        self.num_in, self.num_out = num_words, size
        self.packed: PreparedWeight | None = (
            None  # replaces `weight` if the LM head packed the table
        )
        self.table: WeightRef | None = None  # for a table that no head shares, in blocks of a file
        self.new("weight", num_words, size)

    def weights(self) -> Iterable[WeightRef]:
        return () if self.table is None else (self.table,)

    def forward(self, ids_T: Tensor) -> Tensor:
        packed = self.packed
        if packed is None or packed.rows is None:
            x_TD = embedding(ids_T, self.weight)
        else:
            x_TD = packed.rows(ids_T)
        if self.lora is not None and (numbers_T := current_adapters()) is not None:
            x_TD = lora_lookup(ids_T, x_TD, numbers_T, self.lora)
        return x_TD if self.scale is None else x_TD * x_TD.new_tensor(self.scale)


class Head(Layer):
    """LM head. With `tied`, it uses the embedding's table, which the checkpoint stores once; every rank has all of that.

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
        shares = shared_outputs(num_words) if tied is None else ()
        self.ranks = current_ranks() if shares else None
        num_words = shares[0].length if shares else num_words
        layer = self if tied is None else tied
        self.ref = TableRef(layer, size, num_words, bias=bias, shares=shares)

    def weights(self) -> Iterable[WeightRef]:
        return (self.ref,)

    def forward(self, x_SD: Tensor) -> Tensor:
        """logits_SV"""
        y_SV = self.ref.multiply(x_SD)
        if self.ranks is not None:
            y_SV = self.ranks.gather(y_SV)
        if self.scale == 1.0 and self.softcap is None:
            return y_SV
        return scale_logits(y_SV, self.scale, self.softcap)


class TableRef(WeightRef):
    """The weight of a head, or an embedding's own table. The table of an embedding stays, unless the prepared weight gives its rows as well."""

    is_head = True

    def install(self, prepared: PreparedWeight) -> None:
        if isinstance(self.layer, Embedding):
            if prepared.rows is None:
                self.prepared = prepared
                return
            self.layer.packed = prepared
        super().install(prepared)
