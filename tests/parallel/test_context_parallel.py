"""Prefill context parallelism: the tokens of a step are split over ranks; the same logits, with the same bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.forward_context import current_batch
from quire.parallel.prefill_context_parallel import LEAST, SplitTokens, should_split, split_rows
from quire.parallel.ranks import SingleRank
from quire.worker.context_parallel import ContextModelInput
from tests.models.cases import CASES, VOCAB, Case, write
from tests.models.harness import Runner
from tests.models.test_native import build
from tests.parallel.thread_ranks import ThreadRanks, check_bits, on_ranks

COUNTS = [[1], [3, 1, 1], [32], [33, 1, 5], [200, 7, 16, 1, 90], [64, 64]]


class DealtModel(nn.Module):
    """A model whose steps are split, in the place of the model."""

    def __init__(self, model: nn.Module, ranks: ThreadRanks):
        super().__init__()
        self.model, self.input = model, ContextModelInput(model, ranks)  # type: ignore[arg-type]
        self.attention_layers, self.logits = model.attention_layers, model.logits

    def embed(self, ids_T: Tensor) -> Tensor:
        return ids_T

    def forward(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.input.forward(current_batch())


@pytest.mark.parametrize("parts", [2, 3, 4, 10])
@pytest.mark.parametrize("counts", [*COUNTS, [19] * 9])
def test_each_token_has_one_part(counts: list[int], parts: int):
    split = split_rows(counts, parts)
    found = sorted(
        (row, token) for own in split for row, first, n in own for token in range(first, first + n)
    )
    assert found == [(row, token) for row, count in enumerate(counts) for token in range(count)]
    loads = [sum(piece.length for piece in own) for own in split]
    assert max(loads) - min(loads) <= 2 * parts * len(counts)
    assert min(loads) or not should_split(
        counts, parts
    )  # each part has tokens of a step that is split


def test_parts_of_a_prompt_attend_to_as_many_tokens():
    """The number of pairs of query and key is the time of attention."""
    pairs = [
        sum(first + at for _, first, n in own for at in range(n))
        for own in split_rows([8000], parts=4)
    ]
    assert max(pairs) <= min(pairs) * 1.01


def test_gathered_rows_are_in_the_order_of_the_step():
    counts, x_TW = [40, 3, 30], torch.arange(73 * 2).view(73, 2)

    def run(ranks: ThreadRanks) -> bool:
        split = SplitTokens(ranks, counts)
        own_TW, slots = x_TW[split.own_T], split.slots(100 + torch.arange(73))
        in_order = torch.equal(split.in_order(own_TW), x_TW)
        rows_PW, is_token = split.gather(own_TW), slots > 0
        return in_order and torch.equal(rows_PW[is_token], x_TW[slots[is_token] - 100])

    assert on_ranks(3, run) == [True] * 3


def test_small_steps_exchange_nothing():
    given = ContextModelInput(nn.Module(), SingleRank(0, 2))  # type: ignore[arg-type]
    assert given.accepts_fast_step(plan_of(2 * LEAST - 1))
    assert not given.accepts_fast_step(plan_of(2 * LEAST))


def plan_of(num_tokens: int):  # type: ignore[no-untyped-def]
    from quire.protocol.plan import StepPlan, WorkItem

    return StepPlan(0, freed_rows=[], entered=[], work=[WorkItem(0, num_tokens, True)])


QUICK = {"llama one kv head", "mistral window", "deepseek v3"}
PARAMETERS = [
    pytest.param(c, id=c.name.replace(" ", "-"), marks=() if c.name in QUICK else pytest.mark.slow)
    for c in CASES
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_logits_have_the_same_bits(case: Case, tmp_path: Path):
    """Prompts in chunks beside rows of single tokens, so that steps are split, and small ones are not."""
    write(replace(case, config={"max_position_embeddings": 256, **case.config}), tmp_path)
    whole = build(tmp_path, model_impl="quire", max_model_len=64)
    if whole.state_layers():
        pytest.skip("its layers need all tokens before; see test_ranks_are_refused")
    wanted = logits(whole)

    def run(ranks: ThreadRanks) -> list[Tensor]:
        own = build(tmp_path, model_impl="quire", max_model_len=64)
        found = logits(DealtModel(own, ranks))
        assert ranks.gathered
        return found

    check_bits((2, 3), run, wanted)


def logits(model: nn.Module, **how: Any) -> list[Tensor]:
    draw = random.Random(5)
    runner = Runner(model, block_size=16, **how)
    steps: list[Sequence[tuple[int, int]]] = [
        [(0, 50), (1, 3), (2, 1)], [(0, 2), (1, 1)], [(1, 40), (2, 12), (0, 1)], [(0, 1), (1, 1)],
    ]  # fmt: skip
    for row in range(3):
        runner.add(row, [draw.randrange(1, VOCAB) for _ in range(60)])
    return [each for step in steps for each in runner.step(step)]
