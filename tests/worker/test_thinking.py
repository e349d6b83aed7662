"""A budget of thinking: spent where it is spent, in whatever pieces the tokens are read."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

from engines import Engine, engine

from quire.errors import ValidationError
from quire.features.thinking.budget import ThinkingState
from quire.frontend.request_manager import RequestManager
from quire.protocol.sampling_params import SamplingParams, ThinkingMarkers
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

OPEN, A, B, C = 90, 91, 92, 93  # a mark that opens, and the three tokens of the one that ends
ONE = ThinkingMarkers(3, [[OPEN]], [[A]], opened=False, again=False)
LONG = ThinkingMarkers(3, [[OPEN]], [[A, B, C]], opened=True, again=False)


def said(marks: ThinkingMarkers, wishes: list[int], piece: int = 1) -> list[int]:
    """What comes out if the model wishes for these tokens, and its output is read `piece` tokens at a time."""
    one, out = ThinkingState(marks, 0), []
    for wish in wishes:
        if len(out) - one.read >= piece or len(out) >= marks.budget:
            one.take(out[one.read :])
        token = one.forced()
        out.append(wish if token is None else token)
    return out


def test_reasoning_ends_when_the_budget_is_spent():
    wishes = [1, OPEN, 2, 3, 4, 5, 6, 7]
    assert said(ONE, wishes) == [1, OPEN, 2, 3, 4, A, 6, 7]
    assert said(ONE, [1, OPEN, 2, A, 4, 5, 6, 7]) == [1, OPEN, 2, A, 4, 5, 6, 7]
    assert said(ONE, [1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]
    none = ThinkingMarkers(0, [[OPEN]], [[A]], opened=True, again=False)
    assert said(none, [1, 2, 3]) == [A, 2, 3]


def test_a_mark_of_several_tokens_is_not_begun_twice():
    assert said(LONG, [1, 2, 3, 4, 5, 6, 7]) == [1, 2, 3, A, B, C, 7]
    assert said(LONG, [1, 2, A, 4, 5, 6, 7]) == [1, 2, A, B, C, 6, 7]
    assert said(LONG, [1, A, A, 4, 5, 6, 7]) == [1, A, A, B, C, 6, 7]
    assert said(LONG, [1, A, B, 4, 5, 6]) == [1, A, B, C, 5, 6]
    assert said(LONG, [A, B, C, 4, 5, 6]) == [A, B, C, 4, 5, 6]


def test_thoughts_that_come_again_share_the_budget():
    again = ThinkingMarkers(3, [[OPEN]], [[A]], opened=True, again=True)
    assert said(again, [1, 2, A, 7, OPEN, 4, 5]) == [1, 2, A, 7, OPEN, A, 5]
    assert said(ONE, [OPEN, A, 7, OPEN, 4, 5, 6, 7]) == [OPEN, A, 7, OPEN, 4, 5, 6, 7]


@pytest.mark.parametrize("piece", [1, 2, 3])
def test_markers_are_found_for_any_chunking(piece: int):
    for marks in (ONE, LONG):
        for wishes in ([1, OPEN, 2, 3, 4, 5, 6, 7], [1, A, B, 4, 5, 6, A, B, C]):
            assert said(marks, wishes, piece) == said(marks, wishes)


# -- on an engine ---------------------------------------------------------------------------------
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "run ahead": {"async_scheduling": True},
    "few blocks": {"num_gpu_blocks_override": 9, "block_size": 16, "max_model_len": 128},
}
THINKING = "Count.\n<think>\n"
PARROT = Form(regex="[a-z ]{3,9}!")


def answers(one: Engine, asked: list[tuple[str, SamplingParams]]) -> list[list[int]]:
    front = RequestManager(one.client)
    children = [front.accept(text, params, id="x").children[0] for text, params in asked]
    return one.tokens([c.tokens for c in children], [c.params for c in children])


def crowd() -> list[tuple[str, SamplingParams]]:
    common: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    asked = [
        (THINKING, SamplingParams(thinking_token_budget=budget, seed=budget, **common))
        for budget in (0, 1, 5, 12, 29)
    ]
    free = SamplingParams(thinking_token_budget=-1, seed=1, **common)
    return [*asked, (THINKING, free), ("Once", SamplingParams(temperature=0, **common))]


def test_no_setting_changes_where_reasoning_ends():
    expected: list[list[int]] = []
    for setting, more in SETTINGS.items():
        with engine("quire-tiny", max_num_seqs=16, **more) as one:
            end = RequestManager(one.client).need_tokenizer().encode("</think>", False)
            found = answers(one, crowd())
            expected = expected or found
            assert found == expected, setting
            assert one.stats()["preemptions"] > 0 or setting != "few blocks"
    assert len(end) == 1
    for budget, tokens in zip((0, 1, 5, 12, 29), expected, strict=False):
        first = tokens.index(end[0]) if end[0] in tokens else 30
        assert first <= budget
    assert expected[0][0] == end[0]
    assert expected[2][5] == end[0]  # it would have thought on


def test_a_grammar_begins_when_reasoning_has_ended():
    """`</think>` is forced within the free part of a form, and the rest of it is kept."""
    thoughts = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    answer = {"type": "regex", "pattern": PARROT.regex}
    whole = {"type": "structural_tag", "format": {"type": "sequence", "elements": [thoughts, answer]}}  # fmt: skip
    with engine("quire-tiny") as one:
        params = SamplingParams(thinking_token_budget=4, max_tokens=40, seed=3, structured_outputs=Form(structural_tag=whole))  # fmt: skip
        (tokens,) = answers(one, [(THINKING, params)])
        tokenizer = RequestManager(one.client).need_tokenizer()
        end = tokenizer.encode("</think>", False)[0]
        assert tokens.index(end) == 4
        assert re.fullmatch(PARROT.regex or "", tokenizer.decode(tokens[5:-1]))
        front = RequestManager(one.client)
        front.inputs.reasoning = lambda: None
        with pytest.raises(ValidationError, match="reasoning markers are known"):
            front.accept("a", params, id="x")
