"""The memory of beam search, and scores at the edges; that it finds the right beams is tested in tests/api."""

from __future__ import annotations

import tracemalloc

import pytest

from quire.frontend.beam_search import BeamSearch
from quire.frontend.logprobs import Logprob, Position
from quire.protocol.sampling_params import BeamSearchParams

WIDTH, PROMPT, STEPS = 16, 4000, 6


def entries(beam: int, step: int) -> Position:
    return {
        1000 * step + token: Logprob(-1.0 - 0.1 * token - 0.01 * beam, token + 1)
        for token in range(2 * WIDTH)
    }


def searched(ends: tuple[int, ...] = (), keep_logprobs: bool = True, penalty: float = 1.0) -> BeamSearch:  # fmt: skip
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=STEPS, length_penalty=penalty)
    search = BeamSearch(params, [7] * PROMPT, ends, PROMPT + STEPS + 1, keep_logprobs)
    for step in range(STEPS):
        search.advance([entries(beam, step) for beam in range(len(search.beams))])
    return search


@pytest.mark.parametrize("ends", [(), (1, 1001, 2001, 3001, 4001)], ids=["on", "ends"])
def test_candidates_are_no_copies_of_the_prompt(ends: tuple[int, ...]):
    """2 x width x width of them at each step: of 32,000 tokens and 128 beams they were 8 GB."""
    tracemalloc.start()
    try:
        searched(ends)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    lists = 3 * WIDTH * PROMPT * 8  # the beams, the ones before them, and those that ended
    assert peak < 2 * lists


def test_no_more_finished_beams_are_kept_than_returned():
    search = searched(ends=(1, 1001, 2001, 3001, 4001))
    assert len(search.done) == WIDTH
    scores = [beam.score for beam in search.best()]
    assert scores == sorted(scores, reverse=True)


def test_logprobs_are_kept_only_if_returned():
    assert {len(beam.logprobs) for beam in searched().best()} == {STEPS}
    assert {len(beam.logprobs) for beam in searched(keep_logprobs=False).best()} == {0}


@pytest.mark.parametrize("penalty", [1e308, -1e308, 400.0, -400.0])
def test_a_score_of_any_length_penalty_is_a_number(penalty: float):
    assert len(searched(penalty=penalty).best()) == WIDTH
