"""Graphs on the host's side: which steps are replayed, padding, when one is recorded, and what happens if it cannot be.

The capturer here keeps the function and runs it again, as a device does with what it recorded: from the same memory,
into the same memory.
"""

from __future__ import annotations

import random

import pytest
import torch
from models.harness import make_batch
from torch import Tensor

from quire.forward_context import ForwardBatch, current_batch, forward_context
from quire.worker.graphs import CaptureBudget, GraphModelInput, default_sizes

BLOCKS, LENGTH = 6, 96


class Sum:
    """A source whose output shows every number that layers can read, row by row."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def forward(self, batch: ForwardBatch) -> Tensor:
        seen = current_batch()
        assert seen is batch
        self.rows.append(seen.num_rows)
        counts = seen.query_start_B1.diff()
        assert int(counts.sum()) == seen.num_tokens == len(seen.token_ids_T)
        # Beyond its context a row's table may hold anything.
        used = torch.arange(seen.block_tables[0].shape[1]) < -(-seen.lengths_B[:, None] // 16)
        tables = [(t * used).sum(1) for t in seen.block_tables]
        by_row = torch.stack([seen.rows_B, seen.lengths_B, *tables]).double()
        by_row = torch.cat((by_row, *(x.T.double() for n, x in seen.extras.items() if "_B" in n)))
        by_token = torch.stack([seen.token_ids_T, seen.positions_T, *seen.slots]).double()
        of_tokens = (x[None].double() for n, x in seen.extras.items() if "_B" not in n)
        by_token = torch.cat((by_token, *of_tokens))
        return torch.cat((by_row.repeat_interleave(counts, 1), by_token)).T.contiguous()


class Again:
    def __init__(self, run):
        self.run, self.output = run, run()

    def replay(self) -> None:
        self.output.copy_(self.run())


class Capturer:
    def __init__(self, fails: tuple[int, ...] = ()):
        self.sizes: list[int] = []
        self.fails = fails

    def capture(self, run) -> Again:
        made = Again(run)
        self.sizes.append(len(made.output))
        if len(made.output) in self.fails:
            raise RuntimeError("out of memory")
        return made


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def a_batch(rng: random.Random, counts: list[int]) -> ForwardBatch:
    chunks = [(rng.randrange(50), rng.randint(0, 40), [rng.randrange(999)] * n) for n in counts]
    tables = [[rng.randint(1, 99) for _ in range(BLOCKS)] for _ in counts]
    return make_batch(chunks, tables, 16, num_groups=2)


def source(
    capturer: Capturer, sizes=(1, 2, 4), budget: CaptureBudget | None = None, tokens=(1,)
) -> GraphModelInput:
    return GraphModelInput(
        Sum(),
        capturer,
        sizes,
        BLOCKS,
        LENGTH,
        tokens,
        budget or CaptureBudget(share=1.0),
        null_row=77,
    )


def run(source: GraphModelInput, batch: ForwardBatch) -> Tensor:
    with forward_context(batch):
        return source.forward(batch).clone()


@pytest.mark.parametrize("tokens", [1, 3])
def test_replayed_steps_equal_eager_steps(tokens: int) -> None:
    rng, capturer = random.Random(1), Capturer()
    graphs = source(capturer, tokens=(tokens,))
    for _ in range(30):
        batch = a_batch(rng, [tokens] * rng.randint(1, 4))
        assert torch.equal(run(graphs, batch), run_plain(batch))
    assert graphs.replays == 30
    assert sorted(capturer.sizes) == [tokens, 2 * tokens, 4 * tokens]


def with_extras(rng: random.Random, batch: ForwardBatch) -> ForwardBatch:
    """As a hook adds them: indices of adapters by row, in two columns, and a weight by token."""
    adapters = [[rng.randrange(9), rng.randrange(9)] for _ in range(batch.num_rows)]
    batch.extras["adapters_BX"] = torch.tensor(adapters, dtype=torch.int32)
    batch.extras["weights_T"] = torch.tensor([rng.random() for _ in range(batch.num_tokens)])
    return batch


@pytest.mark.parametrize("tokens", [1, 3])
def test_extra_tensors_are_copied_without_their_names_being_known(tokens: int) -> None:
    rng, capturer = random.Random(8), Capturer()
    graphs = source(capturer, tokens=(tokens,))
    for number in range(40):
        batch = a_batch(rng, [tokens] * rng.randint(1, 4))
        if number % 2:
            with_extras(rng, batch)
        assert torch.equal(run(graphs, batch), run_plain(batch))
    assert graphs.replays == 40
    assert sorted(capturer.sizes) == sorted(2 * [tokens, 2 * tokens, 4 * tokens])


def test_extra_tensors_of_padding_are_zero() -> None:
    rng = random.Random(9)
    graphs = source(Capturer(), sizes=(4,))
    for rows in (4, 2):
        run(graphs, with_extras(rng, a_batch(rng, [1] * rows)))
    ((static, _),) = graphs.captured.values()
    assert [int(x[2:].count_nonzero()) for x in static.batch.extras.values()] == [0, 0]
    assert [int(x[:2].count_nonzero()) > 0 for x in static.batch.extras.values()] == [True, True]


def test_an_extra_tensor_that_is_neither_by_token_nor_by_row_runs_without_a_graph() -> None:
    rng, capturer = random.Random(10), Capturer()
    graphs = source(capturer)
    batch = a_batch(rng, [1, 1])
    batch.extras["table"] = torch.ones(2)
    assert torch.equal(run(graphs, batch), run_plain(batch))
    assert (graphs.replays, graphs.eager, capturer.sizes) == (0, 1, [])


def run_plain(batch: ForwardBatch) -> Tensor:
    with forward_context(batch):
        return Sum().forward(batch)


class Recorded(Sum):
    """Records a hidden state, as a model does (`LanguageModel.record_hidden_states`)."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        current_batch().hidden_states[2] = current_batch().token_ids_T[:, None] * 2.0
        return super().forward(batch)


def test_a_replay_returns_the_hidden_states_of_its_step() -> None:
    rng, graphs = random.Random(8), source(Capturer())
    graphs.inner = Recorded()
    for count in (4, 1, 3, 1):
        batch = a_batch(rng, [1] * count)
        run(graphs, batch)
        assert torch.equal(batch.hidden_states[2], batch.token_ids_T[:, None] * 2.0)
    assert graphs.replays == 4


def test_a_step_with_replaced_embeddings_runs_without_a_graph() -> None:
    batch, graphs = a_batch(random.Random(9), [1]), source(Capturer())
    batch.embeddings.append((torch.tensor([0]), torch.zeros(1, 4)))
    run(graphs, batch)
    assert (graphs.replays, graphs.eager) == (0, 1)


def test_other_steps_run_eagerly() -> None:
    rng, capturer = random.Random(2), Capturer()
    graphs = source(capturer)
    for counts in ([1] * 5, [1, 2], [7], [2, 2]):
        batch = a_batch(rng, counts)
        assert torch.equal(run(graphs, batch), run_plain(batch))
    assert (graphs.replays, graphs.eager, capturer.sizes) == (0, 4, [])


def test_padding_does_not_affect_other_rows() -> None:
    """Three rows in a graph of four: the fourth is a token at place 0 of the null block."""
    rng = random.Random(3)
    graphs = source(Capturer(), sizes=(4,))
    run(graphs, a_batch(rng, [1] * 4))
    run(graphs, a_batch(rng, [1] * 3))
    static = graphs.captured[4, 1, ()][0].batch
    assert graphs.inner.rows[-1] == 4
    assert int(static.lengths_B[3]) == 1
    assert int(static.rows_B[3]) == 77, "padding writes to the recurrent state of another row"
    for tensor in (static.token_ids_T, static.positions_T, *static.slots, *static.block_tables):
        assert not tensor[3].any()


def test_while_a_step_is_captured_all_its_rows_are_padding() -> None:
    seen: list[list[int]] = []

    class Rows(Sum):
        def forward(self, batch: ForwardBatch) -> Tensor:
            seen.append(current_batch().rows_B.tolist())
            return super().forward(batch)

    graphs = source(Capturer(), sizes=(2,))
    graphs.inner = Rows()
    run(graphs, a_batch(random.Random(3), [1, 1]))
    assert seen[0] == [77, 77]


def test_all_sizes_share_their_memory() -> None:
    rng = random.Random(4)
    graphs = source(Capturer())
    for count in (1, 4, 2):
        run(graphs, a_batch(rng, [1] * count))
    found = {static.batch.block_tables[0].data_ptr() for static, _ in graphs.captured.values()}
    assert len(found) == 1


def test_capturing_has_a_bounded_share_of_the_time() -> None:
    """Until it is a size's turn, a larger one serves, or none."""
    rng, capturer, clock = random.Random(5), Capturer(), Clock()
    budget = CaptureBudget(share=0.25, clock=clock)
    graphs = source(capturer, budget=budget)
    run(graphs, a_batch(rng, [1] * 4))
    clock.now = 10.0
    budget.spent(2.0)
    for at, rows, sizes in ((15.9, 1, [4]), (16.0, 1, [4, 1]), (16.0, 2, [4, 1, 2])):
        clock.now = at
        run(graphs, a_batch(rng, [1] * rows))
        assert capturer.sizes == sizes
        budget.free_at = min(budget.free_at, 16.0)
    assert graphs.eager == 0


def test_a_failed_capture_is_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    rng, capturer = random.Random(6), Capturer(fails=(2,))
    graphs = source(capturer)
    for _ in range(3):
        batch = a_batch(rng, [1, 1])
        assert torch.equal(run(graphs, batch), run_plain(batch))
    assert capturer.sizes == [2]
    assert "steps of 2 rows run without a CUDA graph: RuntimeError" in caplog.text


def test_a_lost_device_is_reported_at_once() -> None:
    class Lost:
        def capture(self, run):
            raise torch.AcceleratorError("gone")

    with pytest.raises(torch.AcceleratorError):
        run(source(Lost()), a_batch(random.Random(7), [1]))


def test_sizes() -> None:
    assert default_sizes(1) == [1]
    assert default_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert default_sizes(300)[-4:] == [224, 240, 256, 300]
    assert default_sizes(512)[-3:] == [384, 448, 512]
