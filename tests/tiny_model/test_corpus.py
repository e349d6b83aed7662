"""The corpus: the same from a seed, and what is held out is never trained on."""

from __future__ import annotations

import itertools
import json
import random
import re

import jsonschema
import pytest
from tokenizers import Tokenizer

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_model import (
    chat,
    corpus,
    first_requests,
    grammar,
    results,
    scenes,
    schemas,
    skills,
    stories,
    toolbox,
)
from tools.tiny_model.sample import Sample, ask

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


def test_batches_are_whole_documents():
    seen = 0
    for tokens, weights, documents in next(corpus.batches(TOKENIZER, 3, 4096)):
        assert tokens.shape == weights.shape == documents.shape
        for row in range(len(tokens)):
            used = int((documents[row] == 0).sum())
            assert (documents[row, used:] == -1).all()
            assert not weights[row, used:].any()
            assert tokens[row, used - 1] in (0, 2)  # the end of a text or of a turn
            assert weights[row, 0] == 0
            assert used >= min(tokens.shape[1] / 1.3, tokens.shape[1] - 24) - 1  # little is padding
            seen += used
    assert 4096 <= seen < 4096 + corpus.LONGEST


def test_factors_change_the_shares():
    none = {name: 0.0 for name in corpus.FAMILIES if name != "fact"}
    drawn = _taken(40, 1, False, plain=True, factors=none)
    assert {sample.family for sample in drawn} == {"fact"}


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


@pytest.mark.parametrize("family", ["schema", "invent"])
def test_an_object_fits_its_schema(family: str):
    for sample in _taken(400, 3, False, family, plain=True):
        assert json.loads(sample.answer) == sample.expected
        jsonschema.validate(sample.expected, sample.schema)
        assert "".join(text for text, _ in sample.pieces) == sample.answer


def test_values_stand_in_the_sentence():
    for sample in _taken(400, 3, True, "schema", plain=True):
        text = " ".join(message["content"] for message in sample.messages)
        for value in _leaves(sample.expected):
            if isinstance(value, str) and value not in ("unknown", "positive", "negative"):
                assert value.lower() in text.lower()
            if type(value) in (int, float) and value not in (0, 1):  # "a lamp" is one
                assert str(value) in text


def _leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, list) else [value]


def test_keys_that_only_the_schema_knows_are_not_learnt():
    made = {"name": "Mira", "years": [3, 4]}
    pieces = schemas.pieces(made)
    answer = "".join(text for text, _ in pieces)
    sample = Sample("schema", answer, "key", ask("Mira: 3, 4"), pieces=pieces)
    ids, weights = corpus.encode(TOKENIZER, sample)
    many = len(TOKENIZER.encode(chat.answer_of(sample)).ids)
    by_text = [
        (TOKENIZER.decode([i]), w) for i, w in zip(ids[-many:], weights[-many:], strict=True)
    ]
    assert "".join(text for text, _ in by_text) == answer  # the end of the turn is not decoded
    told = answer.index('"years"')
    at, sure = 0, {}
    for text, weight in by_text:
        sure.update({at + n: weight for n in range(len(text))})
        at += len(text)
    assert sure[answer.index("name")] == sure[told + 1] == sure[0] == 0
    assert sure[answer.index("Mira")] == sure[answer.index("3")] == sure[answer.index("]")] == 1
    assert sure[answer.index(",")] < 0.5  # a schema forbids the end while a key is missing
    assert sure[len(answer) - 1] == 1
    shown = schemas.pieces(made, keys=schemas.VALUE)
    assert {weight for _, weight in shown} == {schemas.VALUE}


def test_an_object_of_an_earlier_turn_is_not_learnt():
    for sample in _taken(2000, 5, False):
        for message in sample.messages:
            content = message["content"]
            if message["role"] == "assistant" and content.startswith("{"):
                assert sample.messages[0]["role"] != "tool"
                assert "JSON" in " ".join(m["content"] for m in sample.messages)


def test_an_answer_says_only_what_the_function_returned():
    for sample in _taken(300, 2, True, "tool_result", plain=True):
        given = " ".join(str(message["content"]) for message in sample.messages)
        for number in re.findall(r"\d+", sample.answer):
            assert number in given
        said = [word for word in scenes.CONDITIONS if re.search(rf"\b{word}\b", sample.answer)]
        assert all(word in given for word in said)


def test_a_question_has_one_answer():
    answers: dict[str, str] = {}
    for sample in [*_taken(4000, 1, False, "fact"), *_taken(4000, 1, False, "honest")]:
        asked = sample.messages[-1]["content"].lower().rstrip(".?!")
        assert answers.setdefault(asked, sample.answer) == sample.answer
    assert answers["what is the capital of france"] == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (first_requests.same_values, '{"sum": 12}', '{"sum": 13}'),
        (first_requests.same_values, ' {"sum":12}', '{"sum": 12'),
        (first_requests.right_sum, "7 + 5 = 12", "7 + 5 = 13"),
        (first_requests.whole_words({"a", "fox"}), "A, a fox!".lower(), "a foxle"),
        (first_requests.whole_words({"a", "fox"}), "seven", "eight"),
    ],
)
def test_what_counts_as_answered(check: first_requests.Check, right: str, wrong: str):
    expected = 12 if check is first_requests.right_sum else {"sum": 12}
    sample = Sample("sums", "", "", ask("What is seven plus 5?"), expected=expected)
    assert check(sample, right, True)
    assert not check(sample, wrong, True)
    assert not check(sample, right, False)


def test_no_request_written_by_hand_was_trained_on():
    texts = {sample.key for sample in first_requests.reworded()}
    assert len(texts) >= 30
    assert not texts & {sample.key for sample in _taken(3000, 1, False, "schema", plain=True)}


def test_a_request_for_several_calls_names_each_value():
    rng = random.Random(1)
    for _ in range(300):
        sample = toolbox.calls(rng)
        assert sample.calls is not None
        assert len(sample.calls) in (2, 3)
        values = [str(value) for call in sample.calls for value in call["arguments"].values()]
        assert len(set(values)) == len(sample.calls)
        assert all(value in sample.messages[-1]["content"] for value in values)


def test_each_of_several_results_is_told():
    rng, several = random.Random(1), 0
    for _ in range(300):
        sample = results.respond(rng)
        calls = next(m["tool_calls"] for m in sample.messages if m["role"] == "assistant")
        told = [m for m in sample.messages if m["role"] == "tool"]
        assert len(told) == len(calls)
        several += len(told) > 1
    assert several > 20
