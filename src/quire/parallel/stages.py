"""The stages of a pipeline: which layers this worker has, and what hands hidden states and tokens to other stages.

Each stage computes a range of the layers for every plan, in the order of the plans, and hands the hidden states to the next
one. The last draws tokens, and announces them to all others: the first needs them for the rows' next tokens.

Shape suffixes: T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.parallel.layout import ONE_RANK, RankLayout

if TYPE_CHECKING:
    from torch import Tensor


class StageLink(Protocol):
    """The link of this rank's stage with the same parts of the other stages.

    Attributes:
        stage: from 0.
        size: the number of stages.
        step: the plan that runs; messages carry it, so that a late stage is noticed at once.
    """

    stage: int
    size: int
    step: int

    def send(self, tensors_TD: Sequence[Tensor]) -> None:
        """To the next stage. Raises RankLost: it has ended, or does not receive in time."""
        ...

    def receive(self) -> list[Tensor]:
        """What the previous stage sent for this step.

        Raises:
            RankLost: it has ended, or does not send in time.
            PlanMismatch: it sent another step's.
        """
        ...

    def announce(self, data: bytes) -> None:
        """From the last stage to all others. Raises RankLost: one has ended."""
        ...

    def announced(self, wait: bool) -> bytes | None:
        """What the last stage announced next; None: nothing has come yet. Raises RankLost: it has ended, or does not send in time."""
        ...

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number among the stages, which may come START_S apart (`ranks.py`)."""
        ...


class PipelineStage(NamedTuple):
    """A stage of the layout, and its link with the others; None: for a plan of its memory, or there is one stage."""

    number: int = 0
    layout: RankLayout = ONE_RANK
    link: StageLink | None = None

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.layout.pipeline - 1

    def layers(self, total: int) -> range:
        """Those of this stage. Raises ConfigError: as `RankLayout.layers`."""
        return self.layout.layers(self.number, total)


ONE_STAGE = PipelineStage()
_current: ContextVar[PipelineStage] = ContextVar("pipeline_stage", default=ONE_STAGE)


@contextmanager
def within_stage(stage: PipelineStage) -> Iterator[None]:
    """Inside, models are constructed with the layers of this stage."""
    token = _current.set(stage)
    try:
        yield
    finally:
        _current.reset(token)


def current_stage() -> PipelineStage:
    """The stage of the model under construction."""
    return _current.get()
