"""Graphs: a step with few tokens per row is captured once and replayed, so that the host launches one graph, not
hundreds of kernels.

Knows which steps can be replayed, padding, static tensors and when to capture. Does not know the model, nor how a
device captures: that is a `GraphCapturer`, which the platform provides.

Every row of such a step has the same number of new tokens (1, or 1 + draft tokens). The step is padded to the next
captured number of rows. A padding row has one token in slot 0 of the null block, and the recurrent state of the null
row; it is computed like any other row and its output is not read. All other steps run without a graph.

Nothing is captured before it is needed, so a server answers from the start. A size is captured while serving, when a
step first needs it, but capture takes at most a share of the time (`CaptureBudget`). Until then a step uses the next
larger captured size, or runs without a graph. A capture that failed is not tried again.

Extra tensors of a batch (`ForwardBatch.extras`) are copied like its own. The first dimension, T or B, is the first letter
after the last underscore of the name; the others must not change between steps, or each change is a capture of its own.

Shape suffixes: T tokens, B rows, M blocks of a row, D hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.forward_context import ForwardBatch, replace_current_batch
from quire.logging import get_logger
from quire.protocol.plan import StepPlan
from quire.worker.model_input import ModelInput

log = get_logger(__name__)

SHARE = 0.2  # of the time, that capture may take


class CapturedGraph(Protocol):
    """A captured step: `replay` reads the same input memory and writes the output that the capture returned."""

    output: Tensor

    def replay(self) -> None: ...


class GraphCapturer(Protocol):
    """Captures graphs on a device."""

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """Run a few times to warm up, then capture. What `run` reads must keep its address."""
        ...


def default_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to 64, of 16 up to 256, of 64 beyond, and max_rows itself."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_rows + 1, 64)}
    return sorted({size for size in sizes if size < max_rows} | {max_rows})


class CaptureBudget:
    """Limits the share of time that capture takes."""

    def __init__(self, share: float = SHARE, clock: Callable[[], float] = time.monotonic):
        self.share, self.clock, self.free_at = share, clock, 0.0

    def allows(self) -> bool:
        return self.clock() >= self.free_at

    def spent(self, seconds: float) -> None:
        self.free_at = self.clock() + seconds * (1 / self.share - 1)


Extra = tuple[str, torch.dtype, tuple[int, ...]]
"""An extra tensor: name, dtype, and its dimensions after the first."""


class GraphKey(NamedTuple):
    """What one captured step serves."""

    size: int  # rows, padding included
    tokens: int  # new tokens of each row
    extras: tuple[Extra, ...]  # in the order of their names


def first_letter(name: str) -> str:
    """T or B, if the name of an extra tensor says that its first dimension is tokens or rows."""
    return name.rpartition("_")[2][:1]


def extras_of(batch: ForwardBatch) -> tuple[Extra, ...]:
    named = sorted(batch.extras.items())
    return tuple((name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in named)


class StaticInputs:
    """Tensors that captured steps read: they keep their address; each step copies its batch into them."""

    def __init__(self, batch: ForwardBatch, null_row: int):
        self.batch, self.null_row = batch, null_row

    @staticmethod
    def allocate(
        size: int, tokens: int, like: ForwardBatch, max_blocks: int, max_length: int, null_row: int
    ) -> StaticInputs:
        """Allocate for `size` rows of `tokens` new tokens and contexts of `max_length`."""
        device = like.token_ids_T.device

        def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_tokens = size * tokens
        return StaticInputs(
            ForwardBatch(
                token_ids_T=new(num_tokens),
                positions_T=new(num_tokens),
                rows_B=new(size).fill_(null_row),
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
                extras={
                    name: new(
                        num_tokens if first_letter(name) == "T" else size, *shape, dtype=dtype
                    )
                    for name, dtype, shape in extras_of(like)
                },
            ),
            null_row,
        )

    def view(self, size: int) -> StaticInputs:
        """A view of the same memory, for fewer rows."""
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
                extras={
                    name: tensor[: tokens if first_letter(name) == "T" else size]
                    for name, tensor in all_of.extras.items()
                },
            ),
            self.null_row,
        )

    def clear(self) -> None:
        """Make all rows padding."""
        static = self.batch
        tensors = (static.token_ids_T, static.positions_T, *static.slots, *static.block_tables)
        for tensor in (*tensors, *static.extras.values()):
            tensor.zero_()
        static.rows_B.fill_(self.null_row)
        static.lengths_B.fill_(static.max_query)

    def copy_from(self, batch: ForwardBatch) -> None:
        """Copy a step's batch in; the rows beyond it become padding."""
        static, rows, tokens = self.batch, batch.num_rows, batch.num_tokens
        static.token_ids_T[:tokens] = batch.token_ids_T
        static.positions_T[:tokens] = batch.positions_T
        static.rows_B[:rows] = batch.rows_B
        static.lengths_B[:rows] = batch.lengths_B
        for into, table in zip(static.block_tables, batch.block_tables, strict=True):
            into[:rows, : table.shape[1]] = table
        for into, slots in zip(static.slots, batch.slots, strict=True):
            into[:tokens] = slots
        for name, tensor in batch.extras.items():
            static.extras[name][: len(tensor)] = tensor
            static.extras[name][len(tensor) :] = 0
        if rows < static.num_rows:
            for tensor in (static.token_ids_T, static.positions_T, *static.slots):
                tensor[tokens:] = 0
            static.rows_B[rows:] = self.null_row
            static.lengths_B[rows:] = static.max_query
            for table in static.block_tables:
                table[rows:] = 0


class GraphModelInput:
    """A model input that replays captured steps.

    Args:
        inner: the model input that is captured, and that runs the other steps.
        sizes: numbers of rows to capture; tokens: numbers of new tokens per row.
        max_blocks: blocks of the longest row; max_length: its tokens.
        null_row: the row of padding, beyond the rows of requests; None: the largest of `sizes`.
    """

    def __init__(
        self,
        inner: ModelInput,
        capturer: GraphCapturer,
        sizes: Sequence[int],
        max_blocks: int,
        max_length: int,
        tokens: Sequence[int] = (1,),
        budget: CaptureBudget | None = None,
        null_row: int | None = None,
    ):
        self.null_row = max(sizes) if null_row is None else null_row
        self.inner, self.capturer, self.budget = inner, capturer, budget or CaptureBudget()
        self.sizes, self.tokens = sorted(sizes), frozenset(tokens)
        self.max_blocks, self.max_length = max_blocks, max_length
        # By tokens per row and extra tensors: for the largest size.
        self.largest: dict[tuple[int, tuple[Extra, ...]], StaticInputs] = {}
        self.captured: dict[GraphKey, tuple[StaticInputs, CapturedGraph]] = {}
        self.failed: set[GraphKey] = set()
        self.replays = self.eager = 0
        self.fused = True

    @property
    def model(self) -> Any:
        return self.inner.model

    @model.setter
    def model(self, model: Any) -> None:
        """Set another model, or one whose memory moved: drops the captured graphs."""
        self.inner.model = model
        self.drop_graphs()

    def set_fused(self, fused: bool) -> None:
        """Without it, all steps run without a graph."""
        self.inner.set_fused(fused)
        self.fused = fused
        self.drop_graphs()

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return self.inner.accepts_fast_step(plan)

    def drop_graphs(self) -> None:
        self.captured.clear()
        self.failed.clear()

    def forward(self, batch: ForwardBatch) -> Tensor:
        """hidden_TD of the batch's tokens: valid until the next step is queued."""
        key = self._select_graph(batch)
        if key is None:
            self.eager += 1
            return self.inner.forward(batch)
        static, graph = self.captured[key]
        static.copy_from(batch)
        graph.replay()
        for after, state_TD in static.batch.hidden_states.items():
            batch.hidden_states[after] = state_TD[: batch.num_tokens]
        self.replays += 1
        return graph.output[: batch.num_tokens]

    def _select_graph(self, batch: ForwardBatch) -> GraphKey | None:
        """The captured step to replay; captures it now if the budget allows. None: run without a graph."""
        tokens = batch.max_query
        if (
            not self.fused
            or batch.embeddings
            or tokens not in self.tokens
            or tokens * batch.num_rows != batch.num_tokens
        ):
            return None
        extras = extras_of(batch)
        if any(first_letter(name) not in ("T", "B") for name, *_ in extras):
            return None
        fitting = [GraphKey(size, tokens, extras) for size in self.sizes if size >= batch.num_rows]
        if not fitting:
            return None
        best = fitting[0]
        if best not in self.captured and best not in self.failed and self.budget.allows():
            self._capture(best, batch)
        return next((key for key in fitting if key in self.captured), None)

    def _capture(self, key: GraphKey, batch: ForwardBatch) -> None:
        size, tokens, extras = key
        began = time.monotonic()
        if (tokens, extras) not in self.largest:
            limits = (
                self.sizes[-1], tokens, batch, self.max_blocks, self.max_length, self.null_row,
            )  # fmt: skip
            self.largest[tokens, extras] = StaticInputs.allocate(*limits)
        static = self.largest[tokens, extras].view(size)
        static.clear()

        def run() -> Tensor:
            static.batch.meta = {}  # attention plans again, so that its planning is captured too
            static.batch.hidden_states = {}
            with replace_current_batch(static.batch):
                return self.inner.forward(static.batch)

        try:
            self.captured[key] = static, self.capturer.capture(run)
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as error:
            self.failed.add(key)
            log.warning("steps of %d rows run without a CUDA graph: %r", size, error)
            return
        seconds = time.monotonic() - began
        self.budget.spent(seconds)
        log.info("captured steps of %d rows (%d tokens each) in %.2f s", size, tokens, seconds)
