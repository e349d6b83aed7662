"""Linear layers: one or several checkpoint weights, multiplied at once.

Knows parts. Does not know how a checkpoint stores a weight, or what multiplies by it (`layers/weights.py`).

Shape suffixes: T tokens, I inputs, W outputs: O, or half of them if gated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from quire.layers.weight_slots import Layer
from quire.layers.weights import WeightRef
from quire.parallel.ranks import OutputSlice, current_ranks, output_slices


class Linear(Layer):
    """x times weight transposed, plus bias.

    Args:
        num_out: outputs; or parts {"q_proj": 64, "k_proj": 32, ...}, by their checkpoint names under this layer's
            parent. The layer concatenates the parts and multiplies by all of them at once.
        packed: the name under which some checkpoints store all parts concatenated.
        exact: it is never quantized.
        act: the result is act(first half of the outputs) * second half; "silu", "gelu" or "gelu_pytorch_tanh".
        after: the result is this activation of the outputs; one of `UNGATED` (ops/reference.py).
        shares: of each part, the outputs that this rank computes; see `WeightRef`.
        gathers: the input is this rank's part, and the result is whole: inputs are gathered before the product, and then the
            outputs, of which each rank computes the same number. Without ranks it means nothing.
    """

    weight: Tensor
    bias: Tensor | None
    may_defer = True

    def __init__(
        self,
        num_in: int,
        num_out: int | Mapping[str, int],
        *,
        bias: bool = False,
        packed: str | None = None,
        act: str | None = None,
        after: str | None = None,
        exact: bool = False,
        shares: Sequence[OutputSlice] = (),
        gathers: bool = False,
    ):
        super().__init__()
        if isinstance(num_out, int) and gathers and (shares := output_slices(num_out)):
            num_out = shares[0].length
        self.ref = WeightRef(
            self,
            num_in,
            num_out,
            bias=bias,
            packed=packed,
            gated=act is not None,
            act=act or "silu",
            after=after,
            exact=exact,
            shares=shares,
        )
        if gathers:
            self.ref.input_ranks = current_ranks()
            self.ref.output_ranks = current_ranks() if shares else None

    def weights(self) -> Iterable[WeightRef]:
        return (self.ref,)

    def forward(self, x_TI: Tensor) -> Tensor:
        """y_TW"""
        return self.ref.multiply(x_TI)

    def extra_repr(self) -> str:
        ref = self.ref
        return f"{ref.num_in} -> {ref.parts or ref.num_out}, bias={ref.bias is not None}"
