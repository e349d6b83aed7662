"""Constraints over HTTP, on a real engine without sockets: every field that may hold one, streams, and refusals."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from constraint_cases import PERSON, TAG, is_person

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from asgi import browser, frames
from scripted import make_state

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.server.state import ServerState

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"  # fmt: skip
SAID = {"messages": [{"role": "user", "content": "hi"}]}
TIGHT = {"disable_any_whitespace": True}
Go = Callable[[str, dict[str, Any]], Awaitable[httpx.Response]]


@pytest.fixture(scope="module")
def state(checkpoint: str) -> Iterator[ServerState]:
    config = EngineConfig.from_keywords(
        model=checkpoint, dtype="float32", max_num_seqs=32, kv_cache_memory_bytes=64 << 20
    )
    client = make_client(config)
    made = make_state(None)
    made.attach(engine := AsyncEngine(client, config))
    yield made
    engine.shutdown()


def talk(state: ServerState, work: Callable[[Go], Awaitable[Any]]) -> Any:
    """Some requests in one loop."""

    async def main() -> Any:
        async with browser(state) as client:

            async def go(path: str, body: dict[str, Any]) -> httpx.Response:
                return await client.post(path, json={"max_tokens": 100, **body})

            return await asyncio.wait_for(work(go), 60)

    return asyncio.run(main())


def said(path: str, body: dict[str, Any]) -> list[str]:
    """The texts of an answer."""
    if path == CHAT:
        return [choice["message"]["content"] for choice in body["choices"]]
    if path == TEXT:
        return [choice["text"] for choice in body["choices"]]
    parts = body["content"] if path == MESSAGES else body["output"][0]["content"]
    return [part["text"] for part in parts]


DIGITS = re.compile("[0-9]{3}")
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}
FLAT = {"type": "json_schema", "name": "person", "schema": PERSON}
SHORT = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}

WAYS: dict[str, tuple[str, dict[str, Any], Callable[[str], Any]]] = {
    "chat regex": (CHAT, SAID | {"structured_outputs": {"regex": "[0-9]{3}"}, "n": 3}, DIGITS.fullmatch),
    "text choice": (TEXT, {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
    "text json": (TEXT, {"prompt": "a", "structured_outputs": {"json": PERSON} | TIGHT}, is_person),
    "text ebnf": (TEXT, {"prompt": "a", "structured_outputs": {"grammar": 'root ::= "n" "o"'}}, "no".__eq__),
    "text tag": (TEXT, {"prompt": "a", "structured_outputs": {"structural_tag": json.dumps(TAG)}}, re.compile("<call>.*</call>").fullmatch),
    "chat tag": (CHAT, SAID | {"response_format": TAG}, re.compile("<call>.*</call>").fullmatch),
    "old regex": (TEXT, {"prompt": ["a", "b"], "guided_regex": "[0-9]{3}"}, DIGITS.fullmatch),
    "old choice": (TEXT, {"prompt": "a", "guided_choice": ["yes"]}, "yes".__eq__),
    "old json": (TEXT, {"prompt": "a", "guided_json": {"const": 5}}, "5".__eq__),
    "old grammar": (CHAT, SAID | {"guided_grammar": 'start: "ab"'}, "ab".__eq__),
    "responses": (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": "ab"}}}}, '"ab"'.__eq__),
    "responses ours": (RESPONSES, {"input": "hi", "structured_outputs": {"regex": "[0-9]{3}"}}, DIGITS.fullmatch),
    "messages": (MESSAGES, SAID | {"output_config": {"format": {"type": "json_schema", "schema": {"const": 7}}}}, "7".__eq__),
    "nothing": (CHAT, SAID | {"response_format": {"type": "text"}, "max_tokens": 3}, str),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_field_with_a_constraint(state: ServerState, way: str):
    path, body, keeps = WAYS[way]
    answer = talk(state, lambda go: go(path, body))
    assert answer.status_code == 200, answer.text
    texts = said(path, answer.json())
    assert texts
    assert all(keeps(text) for text in texts), texts


@pytest.mark.parametrize("form", [{"type": "json_object"}, JSON_SCHEMA, FLAT])
def test_json_is_valid_or_truncated(state: ServerState, form: dict[str, Any]):
    answer = talk(state, lambda go: go(CHAT, SAID | {"response_format": form, "seed": 3}))
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        value = json.loads(choice["message"]["content"])
        assert isinstance(value, dict)
    else:
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].startswith("{")


def test_a_stream_joins_to_the_whole(state: ServerState):
    body = SAID | {
        "structured_outputs": {"json": PERSON} | TIGHT,
        "seed": 5,
        "n": 2,
        "temperature": 1.0,
    }

    async def both(go: Go) -> tuple[httpx.Response, httpx.Response]:
        return await go(CHAT, body), await go(CHAT, body | {"stream": True})

    whole, stream = talk(state, both)
    texts = ["", ""]
    for frame in frames(stream.text)[:-1]:
        for choice in frame["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == said(CHAT, whole.json())
    assert all(is_person(text) for text in texts)


def test_stop_strings_and_logprobs(state: ServerState):
    body = {"prompt": "a", "structured_outputs": {"regex": "[a-c]{2}-[0-9]{6}"}}
    answer = talk(
        state, lambda go: go(TEXT, body | {"stop": ["-"], "logprobs": 2, "temperature": 0})
    )
    choice = answer.json()["choices"][0]
    assert re.fullmatch("[a-c]{2}", choice["text"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "-")
    assert len(choice["logprobs"]["tokens"]) >= 2
    cut = talk(state, lambda go: go(TEXT, body | {"max_tokens": 4})).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    assert len(cut["text"]) == 4


def test_32_at_once_see_only_their_own(state: ServerState):
    ways = [way for way in WAYS if way != "old regex"]

    async def all_at_once(go: Go) -> list[httpx.Response]:
        return await asyncio.gather(
            *(go(WAYS[ways[n % len(ways)]][0], WAYS[ways[n % len(ways)]][1]) for n in range(32))
        )

    for number, answer in enumerate(talk(state, all_at_once)):
        path, _, keeps = WAYS[ways[number % len(ways)]]
        assert answer.status_code == 200
        assert all(keeps(text) for text in said(path, answer.json()))


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "keyword": ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "structured_outputs.json: not"),
    "keywords": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "contains": {}, "uniqueItems": True}}}}, "response_format", "contains, uniqueItems"),
    "regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    "look-around": ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    "grammar": ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs", "missing"),
    "lark": ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs", "a"),
    "tag": ({"response_format": {"type": "structural_tag", "format": {"type": "mystery"}}}, "response_format", "mystery"),
    "two": ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    "none": ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    "two fields": ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice", "structured_outputs"),
    "format and field": ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format", "one constraint"),
    "unknown": ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "yaml"),
    "choices": ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
    "ref loop": ({"structured_outputs": {"json": {"$ref": "#"}}}, None, "structured_outputs.json: no output"),
    "ref circle": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}}}, None, "response_format: no output"),
    "long": ({"structured_outputs": {"grammar": 'start: ("a"){1000000}'}}, "structured_outputs", "the limit is 65536"),
    "hidden": ({"structured_outputs": {"grammar": 'start: a a\na: b b\nb: c c\nc: "x"{60000}'}}, None, "make it smaller"),
    "nested": ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs", "the limit is 10000"),
    "ref": ({"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/x"}}}, "structured_outputs", "127.0.0.1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsatisfiable_constraints_are_400_with_a_reason(state: ServerState, name: str):
    fields, parameter, says = REFUSED[name]
    answer = talk(state, lambda go: go(CHAT, SAID | fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == parameter
    assert says in error["message"], error["message"]
