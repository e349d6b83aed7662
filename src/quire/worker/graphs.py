"""Graphs: a step of few tokens a row is recorded once and replayed, so that the host launches one thing, not hundreds.

Knows which steps can be replayed, padding, static tensors and when to record. Does not know the model, nor how a device
records: that is a `GraphCapturer`, which the platform gives.

Every row of a step that can be replayed has the same number of new tokens (1, or 1 + drafts). It is padded to the next
recorded number of rows; a row of padding has one token at place 0 of the null block, so it is computed like any other
and nobody reads what comes out. All other steps run as they are.

Nothing is recorded before it is wanted, so a server answers from its first second on. A size is recorded in the middle
of serving when a step first wants it, but recording takes at most a share of the time (`CaptureBudget`); until its turn comes,
a step takes the next larger size that is there, or runs as it is. What cannot be recorded is not tried again.

Shape suffixes: T tokens, B rows, M blocks of a row, D hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.forward_context import ForwardBatch, running_instead
from quire.logging import get_logger
from quire.worker.model_input import ModelInput

log = get_logger(__name__)

SHARE = 0.2  # of the time, that recording may take


class CapturedGraph(Protocol):
    """A recorded step: `replay` writes the output that recording returned, from the same inputs' memory."""

    output: Tensor

    def replay(self) -> None: ...


class GraphCapturer(Protocol):
    """How a device records."""

    def record(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """Run a few times to warm up, then record. What `run` reads must stay where it is."""
        ...


def default_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to 64, of 16 up to 256, of 64 beyond, and max_rows itself."""
    found = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_rows + 1, 64)}
    return sorted({size for size in found if size < max_rows} | {max_rows})


class CaptureBudget:
    """When recording may take its turn."""

    def __init__(self, share: float = SHARE, clock: Callable[[], float] = time.monotonic):
        self.share, self.clock, self.free_at = share, clock, 0.0

    def allows(self) -> bool:
        return self.clock() >= self.free_at

    def took(self, seconds: float) -> None:
        self.free_at = self.clock() + seconds * (1 / self.share - 1)


class StaticInputs:
    """Tensors that recorded steps read: their memory stays; a step copies what it has into them."""

    def __init__(self, batch: ForwardBatch):
        self.batch = batch

    @staticmethod
    def room(
        size: int, tokens: int, like: ForwardBatch, max_blocks: int, max_length: int
    ) -> StaticInputs:
        """For `size` rows of `tokens` new tokens; contexts as long as they can ever be."""
        device = like.token_ids_T.device

        def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_tokens = size * tokens
        return StaticInputs(
            ForwardBatch(
                token_ids_T=new(num_tokens),
                positions_T=new(num_tokens),
                rows_B=new(size),
                query_start_B1=torch.arange(
                    0, num_tokens + 1, tokens, dtype=torch.int32, device=device
                ),
                lengths_B=new(size, dtype=torch.int32).fill_(tokens),
                block_tables=[new(size, max_blocks, dtype=torch.int32) for _ in like.block_tables],
                slots=[new(num_tokens) for _ in like.slots],
                sample_at_S=torch.arange(size, device=device),
                max_query=tokens,
                max_length=max_length,
                num_tokens=num_tokens,
                num_rows=size,
            )
        )

    def first(self, size: int) -> StaticInputs:
        """The same memory, for fewer rows."""
        all_of, tokens = self.batch, size * self.batch.max_query
        return StaticInputs(
            replace(
                all_of,
                token_ids_T=all_of.token_ids_T[:tokens],
                positions_T=all_of.positions_T[:tokens],
                rows_B=all_of.rows_B[:size],
                query_start_B1=all_of.query_start_B1[: size + 1],
                lengths_B=all_of.lengths_B[:size],
                block_tables=[table[:size] for table in all_of.block_tables],
                slots=[slots[:tokens] for slots in all_of.slots],
                sample_at_S=all_of.sample_at_S[:size],
                num_tokens=tokens,
                num_rows=size,
            )
        )

    def rest(self) -> None:
        """Nothing but padding."""
        mine = self.batch
        for tensor in (mine.token_ids_T, mine.positions_T, *mine.slots, *mine.block_tables):
            tensor.zero_()
        mine.lengths_B.fill_(mine.max_query)

    def take(self, batch: ForwardBatch) -> None:
        """What this step has; the rows beyond it become padding."""
        mine, rows, tokens = self.batch, batch.num_rows, batch.num_tokens
        mine.token_ids_T[:tokens] = batch.token_ids_T
        mine.positions_T[:tokens] = batch.positions_T
        mine.rows_B[:rows] = batch.rows_B
        mine.lengths_B[:rows] = batch.lengths_B
        for into, table in zip(mine.block_tables, batch.block_tables, strict=True):
            into[:rows, : table.shape[1]] = table
        for into, slots in zip(mine.slots, batch.slots, strict=True):
            into[:tokens] = slots
        if rows < mine.num_rows:
            for tensor in (mine.token_ids_T, mine.positions_T, *mine.slots):
                tensor[tokens:] = 0
            mine.lengths_B[rows:] = mine.max_query
            for table in mine.block_tables:
                table[rows:] = 0


class GraphModelInput:
    """A source that replays what it can.

    Args:
        inner: the source that is recorded, and runs the other steps.
        sizes: numbers of rows to record; tokens: numbers of new tokens a row.
        max_blocks: blocks of the longest row; max_length: its tokens.
    """

    def __init__(
        self,
        inner: ModelInput,
        recorder: GraphCapturer,
        sizes: Sequence[int],
        max_blocks: int,
        max_length: int,
        tokens: Sequence[int] = (1,),
        pace: CaptureBudget | None = None,
    ):
        self.inner, self.recorder, self.pace = inner, recorder, pace or CaptureBudget()
        self.sizes, self.tokens = sorted(sizes), frozenset(tokens)
        self.max_blocks, self.max_length = max_blocks, max_length
        self.rooms: dict[int, StaticInputs] = {}  # by tokens a row: of the largest size
        self.recorded: dict[tuple[int, int], tuple[StaticInputs, CapturedGraph]] = {}
        self.failed: set[tuple[int, int]] = set()
        self.replays = self.eager = 0

    @property
    def model(self) -> Any:
        return self.inner.model

    @model.setter
    def model(self, model: Any) -> None:
        """Another model, or other memory: what was recorded is of no use any more."""
        self.inner.model = model
        self.recorded.clear()
        self.failed.clear()

    def forward(self, batch: ForwardBatch) -> Tensor:
        """hidden_TD of the batch's tokens: valid until the next step is queued."""
        key = self._which(batch)
        if key is None:
            self.eager += 1
            return self.inner.forward(batch)
        static, graph = self.recorded[key]
        static.take(batch)
        graph.replay()
        self.replays += 1
        return graph.output[: batch.num_tokens]

    def _which(self, batch: ForwardBatch) -> tuple[int, int] | None:
        """The recorded step to replay, recorded now if it is its turn; None: run this one as it is."""
        tokens = batch.max_query
        if tokens not in self.tokens or tokens * batch.num_rows != batch.num_tokens:
            return None
        fitting = [(size, tokens) for size in self.sizes if size >= batch.num_rows]
        if not fitting:
            return None
        best = fitting[0]
        if best not in self.recorded and best not in self.failed and self.pace.allows():
            self._record(best, batch)
        return next((key for key in fitting if key in self.recorded), None)

    def _record(self, key: tuple[int, int], batch: ForwardBatch) -> None:
        size, tokens = key
        began = time.monotonic()
        if tokens not in self.rooms:
            most = (self.sizes[-1], tokens, batch, self.max_blocks, self.max_length)
            self.rooms[tokens] = StaticInputs.room(*most)
        static = self.rooms[tokens].first(size)
        static.rest()

        def run() -> Tensor:
            static.batch.meta = {}  # planned anew, so that the plan is recorded too
            with running_instead(static.batch):
                return self.inner.forward(static.batch)

        try:
            self.recorded[key] = static, self.recorder.record(run)
        except torch.AcceleratorError:
            raise  # the device itself is lost
        except Exception as error:
            self.failed.add(key)
            log.warning(
                "steps of %d rows run without a graph: %s: %s", size, type(error).__name__, error
            )
            return
        seconds = time.monotonic() - began
        self.pace.took(seconds)
        log.info("recorded steps of %d rows (%d tokens each) in %.2f s", size, tokens, seconds)
