"""Damaged constraints, thousands of them: each is refused with a reason or compiles."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
from grammar_reader import Reader
from schema_cases import CASES
from test_forms import ADMITS

from quire.errors import ValidationError
from quire.features.structured.validate import check_constraint
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e308, -(1 << 70), "", "x", "\0", "\ud800", "a" * 2000, [], {}, [None], {"": {}},
    {"type": []}, {"$ref": "#"}, {"$ref": ""}, {"$ref": "#/"}, "^", "(", "[^", "\\", "(?", "{", "a{99999}", "[[:alpha:]]",
    "\\p{Greek}", "string", "object", ["string", "string"], {"enum": []}, {"type": "object", "properties": []},
]  # fmt: skip
KEYS = [
    *sorted({case[0] for case in CASES}),
    "x-guidance",
    "",
    "\0",
    "$recursiveRef",
    "type",
    "enum",
]
PIECES = [
    "a", "\\", "(", ")", "[", "]", "{", "}", "*", "+", "?", "|", "^", "$", ".", "-", ",", "1", "9999999999", "\\b", "\\p{L}",
    "(?i)", "(?:", "(?=", "\\1", "\\x", "\\u", "é", "🙂", "\n", "/", "&&", "~", '"', "'", "::=", ":", "start", "root", "%", "#",
    "%json", "@", "<[1]>", "<|x|>", "%ignore", "[lazy]", "\0",
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything within."""
    found: list[tuple[Any, Any]] = []
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    for key, inner in pairs:
        found += [(value, key), *places(inner)]
    return found


def damaged(value: Any, rng: random.Random) -> Any:
    box = {"root": copy.deepcopy(value)}
    for _ in range(rng.choice((1, 1, 2, 5))):
        spots = places(box)
        holder, key = rng.choice(spots)
        kind = rng.randrange(4)
        if kind == 0:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == 1:
            other, name = rng.choice(spots)
            holder[key] = copy.deepcopy(other[name])  # something from elsewhere in it
        elif kind == 2 and isinstance(holder[key], dict):
            holder[key][rng.choice(KEYS)] = copy.deepcopy(rng.choice(ODD))
        elif isinstance(holder[key], str):
            holder[key] = scrambled(holder[key], rng)
    return box["root"]


def scrambled(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice((1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(PIECES) + text[at + rng.choice((0, 0, 1, 3)) :]
    return text


def survives(reader: Reader, make: Any) -> bool:
    """True: it can be compiled, and gives a mask or an error of its own."""
    try:
        form = check_constraint(make())
    except ValidationError as error:
        return not str(error)
    try:
        matcher = reader.matcher(form)
    except ValueError as error:  # with a vocabulary it is too much
        return not str(error)
    words = np.zeros((reader.compiler.vocabulary.tokenizer.vocab_size + 31) // 32, np.int32)
    for _ in range(6):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        tokens = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
        if matcher.is_error() or not len(tokens):
            break
        matcher.consume_token(int(tokens[len(tokens) // 2]))
    return True


@pytest.mark.parametrize("seed", range(4))
def test_damaged_schemas(reader: Reader, seed: int):
    rng = random.Random(seed)
    went = 0
    for number in range(400):
        schema = damaged(CASES[number % len(CASES)][1], rng)
        if number % 5 == 0:
            text = scrambled(json.dumps(schema), rng)
            went += survives(reader, lambda text=text: Form(json=text))
        elif isinstance(schema, str | dict | bool):
            went += survives(reader, lambda schema=schema: Form(json=schema))
    assert went > 30


@pytest.mark.parametrize("seed", range(4))
def test_damaged_forms(reader: Reader, seed: int):
    rng = random.Random(100 + seed)
    went = 0
    for number in range(200):
        form = ADMITS[number % len(ADMITS)][0]
        value = getattr(form, form.kind)
        if form.kind in ("choice", "json_object"):
            value, kind = scrambled("a(b|c)*", rng), "regex"
        else:
            kind = form.kind
            value = scrambled(value, rng) if isinstance(value, str) else damaged(value, rng)
        went += survives(reader, lambda kind=kind, value=value: Form(**{kind: value}))
    assert went > 10
