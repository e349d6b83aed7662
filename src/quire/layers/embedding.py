"""Embedding and LM head: tokens to vectors, vectors to logits.

Shape suffixes: T tokens, S tokens that need logits, V vocabulary, D features.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.layers.weight_slots import Layer
from quire.ops.reference import embedding, linear


class Embedding(Layer):
    """Table lookup; `scale` is rounded to the table's dtype and multiplies the result (Gemma)."""

    weight: Tensor

    def __init__(self, num_words: int, size: int, *, scale: float | None = None):
        super().__init__()
        self.scale = scale
        self.rows: Callable[[Tensor], Tensor] | None = (
            None  # replaces the lookup if the table is packed
        )
        self.new("weight", num_words, size)

    def forward(self, ids_T: Tensor) -> Tensor:
        x_TD = embedding(ids_T, self.weight) if self.rows is None else self.rows(ids_T)
        return x_TD if self.scale is None else x_TD * x_TD.new_tensor(self.scale)


class Head(Layer):
    """LM head. With `tied`, it uses the embedding's table, which the checkpoint stores once."""

    weight: Tensor
    may_defer = True

    def __init__(
        self, num_words: int, size: int, *, tied: Embedding | None = None, bias: bool = False
    ):
        super().__init__()
        self._tied = (tied,)  # a tuple keeps torch from registering it as a submodule
        self.multiply: Callable[[Tensor, Tensor | None], Tensor] = self._multiply
        if tied is None:
            self.new("weight", num_words, size)
        if bias:
            self.new("bias", num_words)
        else:
            self.bias = None

    @property
    def plain(self) -> bool:
        """Whether the head is unquantized and not packed."""
        return self.multiply == self._multiply

    @property
    def table(self) -> Layer:
        """The layer that owns the table: this one, or the embedding."""
        return self._tied[0] or self

    @property
    def table_VD(self) -> Tensor:
        return self.table.get_parameter("weight")

    def forward(self, x_SD: Tensor) -> Tensor:
        return self.multiply(x_SD, self.bias)

    def _multiply(self, x_SD: Tensor, bias_V: Tensor | None) -> Tensor:
        return linear(x_SD, self.table_VD, bias_V)
