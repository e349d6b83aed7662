"""One constraint of every kind, and what a text must be that keeps to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from quire.protocol.structured_outputs import StructuredOutputsParams as Form

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<call>"},
            {"type": "json_schema", "json_schema": {"type": "integer"}},
            {"type": "regex", "pattern": "[xy]{1,3}</call>"},
        ],
    },
}
CHOICES = ["red", "green", "grey", 'a "quoted" one', "ünï"]


def is_person(text: str) -> bool:
    return jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text))


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


KINDS: dict[str, tuple[Form, Callable[[str], bool]]] = {
    "regex": (Form(regex="[a-f]{3,9}-[0-9]+"), matches("[a-f]{3,9}-[0-9]+")),
    "fixed": (Form(regex="[0-9]{4}"), matches("[0-9]{4}")),
    "choice": (Form(choice=CHOICES), CHOICES.__contains__),
    "json": (Form(json=PERSON, disable_any_whitespace=True), is_person),
    "json text": (Form(json=json.dumps(PERSON), whitespace_pattern="[ ]{0,2}"), is_person),
    "json_object": (
        Form(json_object=True, whitespace_pattern=" "),
        lambda text: isinstance(json.loads(text), dict),
    ),
    "ebnf": (
        Form(grammar='root ::= "(" item ("," item)* ")"\nitem ::= [a-c] | root\n'),
        lambda text: text.count("(") == text.count(")") and set(text) <= set("(,)abc"),
    ),
    "lark": (Form(grammar='start: "n=" NUM ";"\nNUM: /[1-9][0-9]{0,4}/\n'), matches("n=[1-9][0-9]{0,4};")),
    "structural_tag": (Form(structural_tag=TAG), matches("<call>-?(0|[1-9][0-9]*)[xy]{1,3}</call>")),
}  # fmt: skip
