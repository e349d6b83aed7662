"""The table of the vocabulary at both ends of a model: tokens to vectors, vectors to logits.

Shape suffixes: T tokens, S places that want logits, V words, D features.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.layers.weight_slots import Layer
from quire.ops.reference import embedding, linear


class Embedding(Layer):
    """Rows of a table; `scale` multiplies them, rounded to their dtype first (Gemma)."""

    weight: Tensor

    def __init__(self, num_words: int, size: int, *, scale: float | None = None):
        super().__init__()
        self.scale = scale
        self.rows: Callable[[Tensor], Tensor] | None = None  # set where the table lies otherwise
        self.new("weight", num_words, size)

    def forward(self, ids_T: Tensor) -> Tensor:
        x_TD = embedding(ids_T, self.weight) if self.rows is None else self.rows(ids_T)
        return x_TD if self.scale is None else x_TD * x_TD.new_tensor(self.scale)


class Head(Layer):
    """Logits. With `tied`, the embedding's table is also the head's, and the checkpoint has it once."""

    weight: Tensor
    may_defer = True

    def __init__(
        self, num_words: int, size: int, *, tied: Embedding | None = None, bias: bool = False
    ):
        super().__init__()
        self._tied = (tied,)  # in a tuple: not a submodule of this one
        self.multiply: Callable[[Tensor, Tensor | None], Tensor] = self._multiply
        if tied is None:
            self.new("weight", num_words, size)
        if bias:
            self.new("bias", num_words)
        else:
            self.bias = None

    @property
    def plain(self) -> bool:
        """Nobody has changed how it multiplies."""
        return self.multiply == self._multiply

    @property
    def table(self) -> Layer:
        """The layer that has the table: this one, or the embedding."""
        return self._tied[0] or self

    @property
    def table_VD(self) -> Tensor:
        return self.table.get_parameter("weight")

    def forward(self, x_SD: Tensor) -> Tensor:
        return self.multiply(x_SD, self.bias)

    def _multiply(self, x_SD: Tensor, bias_V: Tensor | None) -> Tensor:
        return linear(x_SD, self.table_VD, bias_V)
