"""The memory plan on which ranks agree: each has as many rows and blocks as the one with the least room."""

from __future__ import annotations

from dataclasses import replace

from test_memory_plan import FULL, resolved

from quire.parallel.ranks import RankGroups
from quire.worker.memory_forecast import agreed_plan, agreed_sizes
from quire.worker.memory_plan import make_plan
from tests.parallel.thread_ranks import ThreadRanks, on_ranks

PLAN = make_plan(resolved(kv_cache_memory_bytes=3 * 64 * 16 * 41), 1000, 1 << 30, 1 << 30, [FULL])


def test_ranks_plan_with_the_most_weights_and_the_least_memory() -> None:
    weights, total, available = (700, 900, 800), (90, 80, 70), (40, 50, 60)

    def run(ranks: ThreadRanks) -> list[tuple[int, int, int]]:
        at = ranks.rank
        forecast = replace(PLAN, total=total[at], available=available[at])
        groups = RankGroups(tensor=ranks), RankGroups(context=ranks)
        return [agreed_sizes(group, weights[at], forecast) for group in groups]

    assert on_ranks(3, run) == [[(900, 70, 40)] * 2] * 3


def test_stages_have_the_limits_of_the_one_with_the_least_room() -> None:
    """Of checkpoints, only stages with recurrent layers count."""
    blocks, lengths, rows = (40, 30, 50), (256, 512, 128), (4, 3, 9)
    state_bytes, checkpoints = (0, 64, 64), (0, 7, 6)

    def run(ranks: ThreadRanks) -> tuple[int, ...]:
        at = ranks.rank
        own = replace(
            PLAN, num_blocks=blocks[at], max_model_len=lengths[at], max_num_seqs=rows[at],
            state_bytes=state_bytes[at], num_checkpoints=checkpoints[at],
        )  # fmt: skip
        found = agreed_plan(RankGroups(stages=ranks), own)  # type: ignore[arg-type]
        assert found.layout is own.layout
        return found.num_blocks, found.max_model_len, found.max_num_seqs, found.num_checkpoints

    assert on_ranks(3, run) == [(30, 128, 3, 6)] * 3
