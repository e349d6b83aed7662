"""Long bodies, parsed field by field, give the same requests as short ones; too long fields are refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import malformed_requests
import msgspec
import pytest
from asgi import ask
from scripted import ScriptedEngine

from quire.logging import get_logger
from quire.server import json_body_parser, request_body
from quire.server.errors import ApiError
from quire.server.json_body_parser import MOST_VALUES, number_of_values, read_long
from quire.server.openai.sampling_params import MAX_BAD_WORD, MAX_STOP
from quire.server.openapi import BODIES
from quire.server.prompts import MOST_MESSAGES
from quire.server.request_body import MOST_UNKNOWN, SHORT_BODY, read_short

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def outcome(call: Any) -> Any:
    try:
        return repr(msgspec.to_builtins(call()))  # as text, since NaN differs from itself
    except ApiError as error:
        return error.status, error.message.split(":")[0], error.param


def test_long_bodies_parse_like_short_ones():
    draw, taken = random.Random(3), 0
    for _ in range(1500):
        _, path, _, raw = malformed_requests.request(draw)
        kind = BODIES.get(path.partition("?")[0])
        if kind is None:
            continue
        short = outcome(lambda raw=raw, kind=kind: read_short(raw, kind))
        long = outcome(lambda raw=raw, kind=kind: read_long(raw, kind))
        if short == (400, "the body is not valid JSON", None) and b"e400" in raw:
            continue  # a number beyond all limits, in a field that is skipped
        if isinstance(short, tuple) and isinstance(long, tuple):
            assert short[0] == long[0] == 400
        else:
            assert short == long, raw[:500]
            taken += 1
    assert taken > 200


@pytest.mark.parametrize("prompt", [
    [5] * 200_000, [[7, 8, 9] * 1000] * 100, ["a b"] * 90_000, [1, "a", 2] * 40_000, "x" * 400_000, [True] * 100_000, [1.0] * 100_000,
    [[1, 2], "a"] * 20_000, ["1,2[3]{4}" * 10] * 10_000, [-1] * 150_000, [[]] * 100, [[5] * 200_000],
])  # fmt: skip
def test_long_prompts_are_treated_like_short_ones(prompt: Any):
    kind = BODIES[TEXT]
    raw = json.dumps({"prompt": prompt}).encode()
    assert outcome(lambda: read_long(raw, kind)) == outcome(lambda: read_short(raw, kind))


def test_marks_within_strings_are_no_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_body_parser, "MOST_VALUES", 3)
    draw = random.Random(1)
    for _ in range(300):
        monkeypatch.setattr(json_body_parser, "PIECE", draw.randint(3, 40))
        texts = ["".join(draw.choices('\\",:[{a\u00e9\n', k=draw.randint(0, 12))) for _ in range(6)]
        raw = json.dumps(texts, ensure_ascii=draw.random() < 0.5).encode()
        assert number_of_values(raw) in (
            4,
            5,
            6,
        )  # it stops after the fourth, at the end of a piece
        assert number_of_values(json.dumps(texts[:3]).encode()) <= 3


def test_too_many_values_are_refused_by_their_field():
    raw = json.dumps({"messages": [{"role": "user", "content": []}] * (MOST_VALUES // 3)}).encode()
    with pytest.raises(ApiError) as caught:
        read_long(raw, BODIES[CHAT])
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert str(MOST_VALUES) in caught.value.message


@pytest.mark.parametrize(("path", "field", "value"), [
    (TEXT, "stop", "x" * (MAX_STOP + 1)), (TEXT, "stop", ["a", "x" * (MAX_STOP + 1)]), (TEXT, "stop", "x" * (4 << 20)),
    (TEXT, "bad_words", ["x" * (MAX_BAD_WORD + 1)]), (TEXT, "bad_words", ["x" * (8 << 20)]),
    (CHAT, "messages", HI * (MOST_MESSAGES + 1)), (CHAT, "chat_template_kwargs", {"a": "x" * (64 << 10)}),
    (TEXT, "vllm_xargs", {"a": "x" * (64 << 10)}), (TEXT, "user", "x" * (300 << 10)),
    ("/v1/responses", "metadata", {"a": "x" * (64 << 10)}), ("/v1/messages", "stop_sequences", ["x" * (MAX_STOP + 1)]),
    ("/detokenize", "tokens", [5] * ((1 << 19) + 1)),
])  # fmt: skip
def test_too_long_fields_are_refused_by_name(path: str, field: str, value: Any):
    body = {"prompt": "hi", "max_tokens": 4} if path == TEXT else {"messages": HI, "max_tokens": 4}
    body = {"input": "hi"} if path == "/v1/responses" else body
    answer = ask(ScriptedEngine(), "POST", path, body | {field: value})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "the limit is" in message or "has more than" in message
    assert "stop" in message if "stop" in field else field in message


@pytest.mark.parametrize(("path", "field", "value"), [
    (TEXT, "stop", "x" * MAX_STOP), (TEXT, "bad_words", ["x" * MAX_BAD_WORD] * 100), (TEXT, "allowed_token_ids", list(range(200_000)) * 2),
    (CHAT, "chat_template_kwargs", {"a": "x" * 60_000}), (CHAT, "tools", [{"type": "function", "function": {"name": f"f{at}", "description": "x" * 2000}} for at in range(500)]),
    (TEXT, "zz", [[]] * (1 << 20)),
])  # fmt: skip
def test_fields_at_the_limit_are_accepted(path: str, field: str, value: Any):
    body = {"prompt": "hi", "max_tokens": 4} if path == TEXT else {"messages": HI, "max_tokens": 4}
    engine = ScriptedEngine()
    answer = ask(engine, "POST", path, body | {field: value}, tool_call_parser="hermes")
    assert answer.status_code == 200, answer.text
    if field == "allowed_token_ids":
        assert engine.asked[0].params.allowed_token_ids == list(range(200_000))


def test_many_completions_with_many_allowed_ids_are_refused():
    body = {"prompt": "hi", "n": 128, "temperature": 1, "allowed_token_ids": list(range(100_000))}
    answer = ask(ScriptedEngine(), "POST", TEXT, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "allowed_token_ids"


def test_few_unknown_fields_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    looked: list[str] = []
    monkeypatch.setattr("quire.server.request_body.difflib.get_close_matches", lambda name, *_: looked.append(name) or ["max_tokens"])  # fmt: skip
    body = {f"max_tokens{at}": 1 for at in range(500)} | {"y" * 70: 1, "prompt": "hi"}
    assert ask(ScriptedEngine(), "POST", TEXT, body).status_code == 200
    assert len(looked) <= MOST_UNKNOWN
    assert not any(len(name) > 64 for name in looked)


def test_warnings_are_remembered_by_the_known_name():
    for at in range(3000):
        read_short(json.dumps({f"max_tokens{at}": 1, "prompt": "a"}).encode(), BODIES[TEXT])
    known = {name for kind in BODIES.values() for name in kind.__struct_encode_fields__}
    assert set(request_body.log._last) <= known


def test_a_loggers_memory_is_bounded():
    log = get_logger("quire.test_long_bodies")
    for at in range(5000):
        log.warning_every(str(at), 60, "x")
    assert len(log._last) <= 1024


@pytest.mark.parametrize("raw", [
    b"[" * (8 << 20), b'{"a":' * (1 << 20), b'{"messages":' + b"[" * (8 << 20) + b"]" * (8 << 20) + b"}",
    b'{"prompt":' + b"9" * (1 << 20) + b"}", b'{"prompt":[' + b"9" * 300_000 + b"]}", b'{"prompt":"' + b"\xff" * (1 << 17) + b'"}',
    b'{"prompt":[' + b"1," * 200_000 + b"]}", b'{"prompt":[' + b"1," * 200_000 + b'1e400]}', b'{"prompt":"' + b"a" * (1 << 17),
])  # fmt: skip
def test_json_that_is_nested_cut_or_huge_is_refused(raw: bytes):
    """The security review's lines on JSON: nesting and huge numbers are a client's error, at once."""
    assert len(raw) > SHORT_BODY
    for path in (CHAT, TEXT, "/v1/responses", "/v1/messages", "/tokenize", "/detokenize", "/invocations"):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            read_long(raw, BODIES[path if path != "/invocations" else CHAT])
        assert caught.value.status == 400
