"""The corpus: the same from a seed, and what is held out is never trained on."""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_model import chat, corpus, grammar, skills, stories, toolbox
from tools.tiny_model.sample import Sample

TOKENIZER = Tokenizer.from_file(str(EMBEDDED / "quire-tiny" / "tokenizer.json"))


def _taken(many: int, *args: object, **kwargs: object) -> list:
    return list(itertools.islice(corpus.samples(*args, **kwargs), many))


def test_a_seed_reproduces_the_text():
    one, two = (
        [chat.prompt_of(s) + chat.answer_of(s) for s in _taken(60, 7, False)] for _ in range(2)
    )
    assert one == two
    assert one != [chat.prompt_of(s) + chat.answer_of(s) for s in _taken(60, 8, False)]


@pytest.mark.parametrize("family", list(corpus.FAMILIES))
def test_a_prompt_is_on_one_side_of_the_split(family: str):
    sides = []
    for held_out in (False, True):
        drawn = _taken(150, 1, held_out, family, plain=True)
        assert all(sample.held_out is held_out for sample in drawn)
        sides.append({chat.prompt_of(s) or s.answer for s in drawn if s.key})
    if family != "story_chat":  # there it is the story that is new, not the request for one
        assert not sides[0] & sides[1]


def test_held_out_answers_are_in_no_earlier_turn():
    for sample in _taken(1500, 5, False):
        for earlier, answer in itertools.pairwise(sample.messages):
            if earlier["role"] != "user" or answer["role"] != "assistant" or sample.tools:
                continue
            if found := re.search(r"(\d+) \+ (\d+) = \d+$", answer["content"]):
                assert not Sample("sums", "", f"{found[1]}+{found[2]}").held_out


def test_fixed_questions_are_never_counted_as_held_out():
    fixed = {question for asked, _ in skills.HONEST for question in asked}
    for sample in _taken(300, 1, True, "honest", plain=True):
        assert sample.messages[-1]["content"] not in fixed


def test_rows_are_whole_documents():
    length = 512
    rows = corpus.rows(TOKENIZER, 3, length)
    tokens, weights, documents = next(rows)
    assert tokens.shape == weights.shape == documents.shape == (length + 1,)
    used = documents[documents >= 0]
    assert (np.diff(used) >= 0).all()
    for number in range(used.max() + 1):
        ids = tokens[documents == number]
        assert ids[-1] in (0, 2)  # the end of a text or of a turn
        assert weights[documents == number][0] == 0
    assert (weights[documents < 0] == 0).all()


def test_every_column_of_a_thought_adds_up():
    for a, b in itertools.product(range(0, 100, 7), range(0, 100, 3)):
        first, units, tens = skills.scratchpad(a, b).splitlines()
        assert first == f"{a // 10} {a % 10} + {b // 10} {b % 10}"
        written = int(units.split("write ")[1].split(",")[0])
        assert int(tens.split("= ")[1]) * 10 + written == a + b


def test_a_call_matches_its_function_schema():
    for sample in _taken(200, 2, False, "tools"):
        for call in sample.calls or []:
            offered = {tool["function"]["name"]: tool["function"] for tool in sample.tools}
            properties = offered[call["name"]]["parameters"]["properties"]
            assert list(call["arguments"]) == list(properties)


def test_the_passage_contains_the_answer():
    for sample in _taken(200, 2, True, "json", plain=True):
        text = sample.messages[-1]["content"]
        for key, value in json.loads(sample.answer).items():
            assert key in text
            assert str(value) in text


def test_the_grammar_knows_its_stories():
    rng = random.Random(4)
    for _ in range(60):
        text, facts, _ = stories.write(rng)
        assert grammar.hero_kind(text) == facts["k"]
        assert grammar.hero_kind(text.replace(facts["n"], "Zork", 1)) is None
        assert grammar.hero_kind(text + " And then.") is None


def test_names_are_known_or_renamed():
    usual = toolbox.offer("book_flight")
    assert usual.schema["function"]["parameters"]["required"] == ["from_city", "to_city"]
    others = {toolbox.offer("book_flight", random.Random(i)).called for i in range(40)}
    assert {"book_flight", "bookFlight"} <= others
