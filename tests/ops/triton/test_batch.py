"""A step's inputs, gathered from rows: equal to what indexing gives."""

from __future__ import annotations

import random

import torch
from ops.triton.kernel_device import DEVICE

from quire.ops.triton.gather_inputs import gather, scatter, slots


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def test_tokens_positions_and_slots() -> None:
    rng = random.Random(2)
    tokens = torch.randint(0, 999, (6, 300), dtype=torch.int32).to(DEVICE)
    blocks = torch.randint(1, 99, (6, 19), dtype=torch.int32).to(DEVICE)
    for _ in range(3):
        rows = rng.sample(range(6), 4)
        counts = [rng.choice([1, 1, 3, 64, 65, 170]) for _ in rows]
        firsts = [rng.randint(0, 300 - n) for n in counts]
        starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        where = (ints(rows, torch.int64), ints(starts), ints(firsts))
        ids, positions = gather(tokens, *where, starts[-1], max(counts))
        places = [
            (r, p) for r, a, n in zip(rows, firsts, counts, strict=True) for p in range(a, a + n)
        ]
        assert ids.tolist() == [int(tokens[r, p]) for r, p in places]
        assert positions.tolist() == [p for _, p in places]
        got = slots(blocks, *where, starts[-1], max(counts), 16)
        assert got.tolist() == [int(blocks[r, p // 16]) * 16 + p % 16 for r, p in places]


def test_pieces_go_to_their_places() -> None:
    table = torch.zeros(4, 200, dtype=torch.int32, device=DEVICE)
    want = table.clone()
    values = torch.arange(1, 102, dtype=torch.int32, device=DEVICE)
    want[2, 5:6], want[0, 100:200] = values[:1], values[1:]
    scatter(table, ints([2, 0], torch.int64), ints([5, 100]), ints([0, 1, 101]), values, 100)
    assert torch.equal(table, want)
