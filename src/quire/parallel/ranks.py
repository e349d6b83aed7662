"""The ranks of tensor parallelism: which part of each layer this worker has, and what gathers the parts.

Every weight is cut along its outputs, never along the inputs that a product sums over. So each output is one sum, in one
rank and in the same order whatever the number of ranks, and results have the same bits (docs/decisions/0065).

Shape suffixes: R ranks, T tokens, W width of one rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.parallel.layout import FIRST, ONE_RANK, RankLayout, RankPlace
from quire.parallel.stages import PipelineStage, StageLink

if TYPE_CHECKING:
    from torch import Tensor


START_S = 1800.0
"""How long a rank may load its part of the model after another has. (One that ends is noticed at once.)"""
LOOK_S = 1.0
"""How often a wait for another rank looks whether it goes on, where no kernel waits."""
PANEL = 32
"""Outputs that the CPU kernels compute at once. Torch computes the ends of rows that are no multiple of 16 with other bits."""


class OutputSlice(NamedTuple):
    """A rank's part of `total` outputs: `length` of them, from `start`."""

    start: int
    length: int
    total: int

    def times(self, factor: int) -> OutputSlice:
        """Of heads with `factor` outputs each."""
        return OutputSlice(self.start * factor, self.length * factor, self.total * factor)

    def of(self, x_TX: Tensor) -> Tensor:
        """This rank's part of outputs that it has all of."""
        return x_TX[..., self.start : self.start + self.length]


class RankGroup(Protocol):
    """This rank, and its exchange with the others. All ranks call the same methods in the same order.

    Attributes:
        rank: from 0.
        size: the number of ranks.
        link: the address of the C struct `RankLink` (kernels/exchange.h), so that kernels gather; None: they cannot.
    """

    rank: int
    size: int
    link: int | None

    def gather(self, x_TW: Tensor) -> Tensor:
        """The parts of all ranks side by side: [T, R * W].

        Raises:
            RankLost: another rank did not come in time.
        """
        ...

    def check(self) -> None:
        """Raises RankLost: another rank did not come to an exchange of the kernels since the last check."""
        ...

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number among the ranks, which may come START_S apart. Raises as `gather`."""
        ...


class SingleRank:
    """The description of a rank for a plan of its memory: it exchanges nothing."""

    link: int | None = None

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def gather(self, x_TW: Tensor) -> Tensor:
        raise RuntimeError("this rank has no partners")

    def check(self) -> None:
        """Nothing was exchanged."""

    def least(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """One rank: its place in the layout, and its exchanges with the others; None: it shares this with no other.

    tensor: with the ranks that split each layer. context: with those that compute other parts of a context. stages: with the
    other stages. blocks: with those that keep other blocks of the same KV cache.
    """

    place: RankPlace = FIRST
    layout: RankLayout = ONE_RANK
    tensor: RankGroup | None = None
    context: RankGroup | None = None
    stages: StageLink | None = None
    blocks: RankGroup | None = None

    @property
    def stage(self) -> PipelineStage:
        return PipelineStage(self.place.stage, self.layout, self.stages)

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number among all ranks."""
        least = list(numbers)
        for group in (self.tensor, self.context, self.stages):
            if group is not None:
                least = group.least(least)
        return least


_current: ContextVar[RankGroup | None] = ContextVar("tensor_ranks", default=None)


@contextmanager
def split_among(ranks: RankGroup | None) -> Iterator[None]:
    """Inside, layers are constructed as the parts of this rank; None: as whole layers."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)


def current_ranks() -> RankGroup | None:
    """The ranks that split the layers under construction."""
    return _current.get()


def output_slice(ranks: RankGroup, total: int, copies: int = 1) -> OutputSlice:
    """This rank's part of `total` outputs, where `copies` neighbouring ranks have the same part."""
    length = total * copies // ranks.size
    return OutputSlice(ranks.rank // copies * length, length, total)


def output_slices(total: int) -> Sequence[OutputSlice]:
    """This rank's part of a weight's outputs; none: each rank computes all, for there are no ranks, or parts of whole panels
    cannot be made."""
    ranks = current_ranks()
    if ranks is None or total % (ranks.size * PANEL):
        return ()
    return (output_slice(ranks, total),)


def head_slices(num_heads: int, num_kv_heads: int) -> Sequence[OutputSlice]:
    """This rank's query heads, key heads and value heads; none: as `output_slices`, where heads cannot be divided.

    Where there are fewer key heads than ranks, neighbours have the same one.
    """
    ranks = current_ranks()
    if ranks is None or num_heads % ranks.size:
        return ()
    copies = max(1, ranks.size // num_kv_heads)
    if num_kv_heads * copies % ranks.size:
        return ()
    kv = output_slice(ranks, num_kv_heads, copies)
    return output_slice(ranks, num_heads), kv, kv


def use_same_threads(ranks: RankGroups) -> None:
    """Take the least number of threads among the ranks: the rank with the fewest sets the pace, and others would wait."""
    import torch

    (least,) = ranks.least([torch.get_num_threads()])
    torch.set_num_threads(least)
