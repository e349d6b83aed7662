"""Layers: the decoder layers of a model, or of a stage of it, one after the other.

Knows what goes from a layer to the next. Does not know what a layer computes.

Shape suffixes: T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from quire.forward_context import current_batch
from quire.layers.decoder_layer import normed_sum
from quire.layers.norm import Norm
from quire.layers.rotary import LayerRotaries


class FusedLayers(Protocol):
    """All layers and the last norm in few kernel calls, with the same results."""

    def run(
        self, x_TD: Tensor, residual_TD: Tensor | None, positions: Tensor, rotary: LayerRotaries
    ) -> tuple[Tensor, Tensor | None]:
        """As `Layers.advance`; if the layers are the last, x is as of `Layers.forward`. May overwrite both."""
        ...


class Layers(nn.ModuleList):
    """The decoder layers of a model, in order.

    A layer takes (x_TD, residual_TD or None, angles) and returns (x_TD, residual_TD); its output is their sum.

    Args:
        first, total: the number of the first of these layers in the model, and of all its layers; 0: these are all.
    """

    fused: FusedLayers | None = None  # set if kernel calls compute several modules at once
    recorded: frozenset[int] = frozenset()  # see `LanguageModel.record_hidden_states`

    def __init__(self, layers: Iterable[nn.Module], first: int = 0, total: int = 0):
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)
        self.first, self.total = first, total or len(self)

    def forward(
        self,
        x_TD: Tensor,
        positions: Tensor,
        rotary: LayerRotaries,
        norm: Norm | None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        """The output of the last layer, normed if there is a norm; positions: see `Rotary.forward`."""
        x_TD, residual_TD = self.advance(x_TD, residual_TD, positions, rotary)
        return x_TD if self._running() else normed_sum(norm, x_TD, residual_TD)[0]

    def advance(
        self, x_TD: Tensor, residual_TD: Tensor | None, positions: Tensor, rotary: LayerRotaries
    ) -> tuple[Tensor, Tensor | None]:
        """(x_TD, residual_TD) after these layers."""
        if (fused := self._running()) is not None:
            return fused.run(x_TD, residual_TD, positions, rotary)
        for number, (layer, angles) in enumerate(zip(self, rotary(positions), strict=True)):
            self.record(number, x_TD, residual_TD)
            x_TD, residual_TD = layer(x_TD, residual_TD, angles)
        self.record(len(self), x_TD, residual_TD)
        return x_TD, residual_TD

    def _running(self) -> FusedLayers | None:
        """What runs in place of the modules in this step."""
        if self.fused is None or current_batch().split_tokens is not None:  # kernels gather no keys
            return None
        return self.fused

    def record(self, number: int, x_TD: Tensor, residual_TD: Tensor | None) -> None:
        """Copy the output of `number` layers to the batch, if it is wanted."""
        if number in self.recorded:
            copied = x_TD.clone() if residual_TD is None else x_TD + residual_TD
            current_batch().hidden_states[number] = copied
