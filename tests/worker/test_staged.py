"""Staged rows: the batches that plain rows give, over random lives of requests, with one copy a step."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")
import triton_interpreter  # noqa: F401

from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.device_rows import TOKENS, DeviceInputBatchBuilder, DeviceRows
from quire.worker.input_batch import InputBatchBuilder
from quire.worker.request_rows import RequestRows
from quire.worker.staging_buffer import LINE, StagingBuffer

ROWS, LENGTH, GROUPS, BLOCK = 4, 80, 2, 8
STATES = 100  # of an encoder, at most; their blocks are a third group


def plans(rng: random.Random, count: int):
    """Requests that come, compute, draw and go; blocks are any numbers."""
    length, done = {}, {}
    for step in range(count):
        left = [row for row in length if rng.random() < 0.2]
        for row in left:
            del length[row], done[row]
        entered = []
        for row in sorted(set(range(ROWS)) - length.keys()):
            if rng.random() < 0.6:
                tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 40))]
                length[row], done[row] = len(tokens), 0
                states = rng.randint(1, STATES)
                blocks = [[], [], [rng.randint(1, 99) for _ in range(-(-states // BLOCK))]]
                entered.append(
                    EnteredRow(
                        row, f"{step}-{row}", tokens, len(tokens), 0, blocks, SamplingParams(),
                        num_encoder_tokens=states,
                    )
                )  # fmt: skip
        work = []
        for row in rng.sample(sorted(length), rng.randint(0, len(length))):
            left_to_do = min(length[row], LENGTH - 1) - done[row]
            if left_to_do <= 0:
                continue
            n = rng.randint(1, left_to_do)
            have, need = -(-done[row] // BLOCK), -(-(done[row] + n) // BLOCK)
            new = [[rng.randint(1, 99) for _ in range(need - have)] for _ in range(GROUPS)]
            done[row] += n
            length[row] += done[row] == length[row]
            work.append(WorkItem(row, n, new if need > have else []))
        if work or entered or left:
            yield StepPlan(step, entered, work, left)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_staged_batches_equal_plain_batches(seed: int) -> None:
    sizes = ROWS, LENGTH, GROUPS + 1, BLOCK, "cpu", {GROUPS: STATES}
    made = [kind(*sizes) for kind in (RequestRows, DeviceRows)]
    batchers = [InputBatchBuilder(made[0]), DeviceInputBatchBuilder(made[1])]
    seen = 0
    for plan in plans(random.Random(seed), 25):
        for rows in made:
            for row in plan.freed_rows:
                rows.leave(row)
            for new in plan.entered:
                rows.enter(new)
        if not plan.work:
            continue
        want, got = (batcher.build(plan) for batcher in batchers)
        for field in fields(want):
            a, b = getattr(want, field.name), getattr(got, field.name)
            pairs = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]
            for x, y in pairs:
                same = torch.equal if isinstance(x, torch.Tensor) else np.array_equal
                assert same(x, y), field.name
        assert len(want.slots[GROUPS]) == sum(
            want.encoder.lengths[b] for b in want.encoder.new_rows
        )
        for rows in made:  # what is drawn is written on the device
            for index in want.drawing:
                row = plan.work[index].row
                rows.token_ids_RL[row, rows.num_computed_tokens[row]] = plan.step
        seen += len(plan.work)
    assert seen > 20


def test_the_last_staged_write_wins() -> None:
    """A prompt outside the vocabulary is replaced by zeros before anything is computed of it."""
    rows = DeviceRows(ROWS, LENGTH, 1, BLOCK)
    rows.enter(EnteredRow(1, "a", [7, 8, 9], 3, 0, [[5]], SamplingParams()))
    rows.write_tokens(1, 0, [0, 0, 0])
    assert rows.pieces[TOKENS] == [(1, 0, [0, 0, 0])], "pieces of one flush are written in no order"
    rows.write_tokens(1, 3, [4])
    rows.flush()
    assert rows.token_ids_RL[1, :5].tolist() == [0, 0, 0, 4, 0]
    assert rows.tables[0][1, :2].tolist() == [5, 0]
    assert rows.pieces == {}


def test_a_staging_buffer_uses_its_host_sides_in_turn() -> None:
    buffer = StagingBuffer(12, "cpu", copies=2)
    found = []
    for step in range(3):
        buffer.begin()
        parts = [buffer.append(np.array([step, 1])), buffer.append(np.array([step, 2, 3]))]
        assert [part.start % LINE for part in parts] == [0, 0]
        packed = buffer.upload()
        assert [packed[part].tolist() for part in parts] == [[step, 1], [step, 2, 3]]
        found.append(packed.data_ptr())
    assert found[0] == found[2] != found[1]
    with pytest.raises(ValueError, match="17 integers do not fit a staging buffer of 12"):
        buffer.append(np.zeros(9))


@pytest.mark.device
def test_on_a_device_a_copy_is_not_overtaken() -> None:
    buffer = StagingBuffer(1 << 20, "cuda", copies=2)
    kept = []
    for step in range(20):
        buffer.begin()
        part = buffer.append(np.full(1 << 20, step))
        kept.append(buffer.upload()[part].clone())
    assert [int(x.float().mean()) for x in kept] == list(range(20))
