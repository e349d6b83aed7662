"""Draft tokens of constrained requests: those that a grammar allows, and no token changes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_reader import Reader

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))
sys.path.insert(0, str(Path(__file__).parents[1] / "speculation"))

from engines import Engine, engine
from test_engine import EOS, SPECIALS, crowd, params, prompt
from test_speculation import answers, config, hook_of
from worker.known_answers import KnownAnswers

from quire.features.structured.grammar_messages import GrammarRowSettings
from quire.features.structured.grammar_rows import GrammarStates
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

A, B, C, D = (SPECIALS + ord(letter) - 33 for letter in "abcd")


@pytest.fixture(scope="module")
def plain(checkpoint: str) -> Iterator[Engine]:
    with engine(checkpoint, max_num_seqs=32) as one:
        yield one


def states_of(reader: Reader, form: Form, outputs: list[int] | None = None) -> GrammarStates:
    accepts = reader.compiler.vocabulary.accepts
    states = GrammarStates(lambda: reader.matcher(form), accepts, (accepts + 32) // 32)
    states.begin(0, GrammarRowSettings([EOS], False, 40, 40, False), outputs or [])
    return states


def allowed(mask_W: np.ndarray) -> set[int]:
    return set(np.unpackbits(mask_W.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def test_draft_tokens_are_those_that_the_grammar_allows(reader: Reader) -> None:
    states = states_of(reader, Form(regex="ab*(cd)?"))
    before = states.fill([0])
    drafts, over, masks = states.look_ahead(0, [A, B, B, A, B], 8)
    assert drafts == [A, B, B]  # the second a is forbidden
    assert over == [False] * 3
    assert [allowed(mask) for mask in masks] == [{B, C, EOS}] * 3
    assert states.look_ahead(0, [A, B, B, B], 2)[0] == [A, B]
    drafts, over, masks = states.look_ahead(0, [A, C, D, EOS], 8)
    assert drafts == [A, C, D]  # the grammar ends there
    assert over == [False, False, True]
    assert np.array_equal(states.fill([0]), before)
    assert states.feed(0, [A, B]) == []
    assert allowed(states.fill([0])[0]) == {B, C, EOS}


def test_forced_tokens_are_the_first_draft_tokens(reader: Reader) -> None:
    states = states_of(reader, Form(regex="a(bcd|bcda)+c"))
    assert states.look_ahead(0, [], 8)[0] == [A, B, C, D]
    assert states.look_ahead(0, [B, B], 3)[0] == [A, B, C]  # in place of wrong ones
    assert states.look_ahead(0, [A, B, C, D, A, B, C], 6)[0] == [A, B, C, D, A, B]
    assert states.look_ahead(0, [A, B, C, D, B, A], 8)[0] == [A, B, C, D, B, C, D]
    assert states.feed(0, [A]) == []  # jumps are off
    room = states_of(reader, Form(regex="a{60}"), [A] * 36)
    assert room.look_ahead(0, [], 8)[0] == [A] * 3  # of 40 outputs the last one is drawn


@pytest.mark.parametrize(
    ("depth", "jumps", "right", "count"), [(1, True, 0.8, 32), (1, False, 1.0, 12), (1, True, 0.0, 12), (2, True, 0.8, 12)]
)  # fmt: skip
def test_draft_tokens_change_no_answer(
    checkpoint: str, plain: Engine, depth: int, jumps: bool, right: float, count: int
) -> None:
    prompts, each = (part[:count] for part in crowd())
    for asked in each[::3]:
        asked.logprobs = 2
    expected = answers(plain, each, prompts)
    known = {tuple(p): found[0] for p, found in zip(prompts, expected, strict=True)}
    settings: dict[str, Any] = {"structured_outputs_config": {"jumps": jumps}}
    with engine(
        checkpoint, depth, max_num_seqs=32, speculative_config=config(4, adaptive=False), **settings
    ) as one:
        hook_of(one).drafter = KnownAnswers(known, right)
        assert answers(one, each, prompts) == expected
        counts = one.stats()["counts"]
        assert counts["spec_decode_num_draft_tokens"] > 20
        if right == 1.0:
            drafted = counts["spec_decode_num_draft_tokens"]
            assert counts["spec_decode_num_accepted_tokens"] == drafted


def test_forced_tokens_save_steps_where_they_must_be_drawn(checkpoint: str, plain: Engine) -> None:
    """A request that reports log-probabilities draws every token."""
    each = [
        params(Form(regex="(one|two) hundred and (six|ten)"), seed, logprobs=1) for seed in range(3)
    ]
    prompts = [prompt(seed) for seed in range(3)]
    before = plain.stats()["steps"]
    expected = answers(plain, each, prompts)
    steps = plain.stats()["steps"] - before
    with engine(checkpoint, speculative_config=config(6, adaptive=False)) as one:
        hook_of(one).drafter = KnownAnswers({}, 1.0)
        hook_of(one).drafter.propose = lambda row, limit: []  # type: ignore[method-assign]
        assert answers(one, each, prompts) == expected
        assert one.stats()["steps"] < 0.6 * steps


def test_a_thinking_budget_takes_draft_tokens(checkpoint: str, plain: Engine) -> None:
    from quire.protocol.sampling_params import ThinkingMarkers

    draw = random.Random(3)
    prompts = [prompt(number) for number in range(6)]
    each = [
        SamplingParams(
            max_tokens=24, seed=number, ignore_eos=True, temperature=number % 2,
            thoughts=ThinkingMarkers(draw.randint(0, 9), [[90]], [[91, 92, 93]], number % 3 > 0, True),
        )
        for number in range(6)
    ]  # fmt: skip
    expected = answers(plain, each, prompts)
    known = {tuple(p): found[0] for p, found in zip(prompts, expected, strict=True)}
    with engine(checkpoint, speculative_config=config(5, adaptive=False)) as one:
        hook_of(one).drafter = KnownAnswers(known, 0.8)
        assert answers(one, each, prompts) == expected
        assert one.stats()["counts"]["spec_decode_num_accepted_tokens"] > 30


def test_where_steps_are_queued_ahead_forced_tokens_are_draft_tokens(
    checkpoint: str, plain: Engine
) -> None:
    """Behind draft tokens in flight, a forced token that needs no draw would cost the request its row."""
    each = [params(Form(regex="(one|two) hundred and (six|ten)"), seed) for seed in range(4)]
    prompts = [prompt(seed) for seed in range(4)]
    expected = answers(plain, each, prompts)
    with engine(checkpoint, 2, speculative_config=config(4, adaptive=False)) as one:
        hook_of(one).drafter = KnownAnswers({}, 0.0)
        assert answers(one, each, prompts) == expected
        stats = one.stats()
        assert stats["counts"]["spec_decode_num_accepted_tokens"] > 20
        assert stats["preemptions"] == 0
