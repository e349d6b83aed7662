"""CheckpointTensor: a tensor of a checkpoint format, and how its rows map to the outputs of a weight.

Knows shapes. Does not know layers or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch

from quire.errors import ConfigError
from quire.parallel.ranks import OutputSlice


class CheckpointTensor(NamedTuple):
    """One tensor of a checkpoint format.

    `dim`: the dimension of the outputs. One element holds `pack_factor` outputs, maybe not a whole number; each part of the weight starts a new
    element. `per_part`: each part has one such tensor, whatever its number of outputs; the parameter concatenates them.
    `optional`: a checkpoint may lack it; the parameter then stays on "meta". `widths`: bytes of an output, for each part; the
    tensors then are flat.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 0
    pack_factor: int | Fraction = 1
    per_part: bool = False
    optional: bool = False
    widths: tuple[int, ...] = ()

    def lengths(self, outputs: Sequence[int]) -> list[int]:
        """Length of each part's tensor along `dim`."""
        if self.widths:
            return [outs * width for outs, width in zip(outputs, self.widths, strict=True)]
        return [1 if self.per_part else -(-part // self.pack_factor) for part in outputs]

    def shares(self, outputs: Sequence[OutputSlice], part: int = 0) -> tuple[OutputSlice, ...]:
        """What a rank has of the tensor of a part along `dim`, where `outputs` are its pieces of the part's outputs.

        Raises:
            ConfigError: an element of the tensor holds outputs of two ranks.
        """
        if self.per_part:
            return ()
        factor = Fraction(self.pack_factor)
        for number, share in enumerate(outputs, 1):
            end = share.start + share.length
            inside = (
                number < len(outputs) and share.total % factor
            )  # the next piece begins within an element
            if inside or share.start % factor or (end % factor and end != share.total):
                raise ConfigError(
                    f"tensor_parallel_size: a checkpoint tensor packs {factor} of {share.total} outputs into one element, so"
                    f" a rank cannot have outputs {share.start} to {end}; use a smaller tensor_parallel_size"
                )
        own = self._replace(widths=self.widths[part : part + 1] * len(outputs))
        starts, lengths, totals = (own.lengths(counts) for counts in zip(*outputs, strict=True))
        return tuple(map(OutputSlice, starts, lengths, totals))

    def shape_for(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """Shape of the parameter that holds all parts."""
        total = sum(self.lengths(outputs))
        if self.widths:
            return (total,)
        if self.per_part:
            return (total, *self.shape)
        return (*self.shape[: self.dim], total, *self.shape[self.dim + 1 :])
