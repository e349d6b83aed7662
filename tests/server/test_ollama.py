"""Ollama's and llama.cpp's routes over a scripted engine: shapes, errors, and hostile bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import ask, frames
from scripted import ScriptedEngine, make_state

HI = [{"role": "user", "content": "hi"}]
KEY = {"Authorization": "Bearer k"}


class CodeModel(ScriptedEngine):
    """It has the tokens that fill a gap."""

    def token_id(self, token: str) -> int | None:
        return 7 if token.startswith("<|fim_") else None


class PlainModel(ScriptedEngine):
    def token_id(self, token: str) -> int | None:
        return None


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CodeModel, PlainModel):
        monkeypatch.setattr(kind, "need_tokenizer", lambda self, parameter="": self)


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_chat_streams_lines_of_json_unless_told_otherwise():
    engine = ScriptedEngine("Hel", "lo")
    answer = ask(
        engine,
        "POST",
        "/api/chat",
        {
            "model": "toy:latest",
            "messages": HI,
            "options": {"num_predict": 9, "top_k": 3, "repeat_penalty": 1.5},
        },
    )
    assert answer.headers["content-type"] == "application/x-ndjson"
    said = lines(answer.text)
    assert [one["message"]["content"] for one in said] == ["Hel", "lo", ""]
    assert [one["done"] for one in said] == [False, False, True]
    assert all(one["model"] == "toy" for one in said)
    assert (said[-1]["done_reason"], said[-1]["eval_count"], said[-1]["prompt_eval_count"]) == (
        "stop",
        5,
        len("u:hi\na:"),
    )
    params = engine.asked[0].params
    assert (params.max_tokens, params.top_k, params.repetition_penalty) == (9, 3, 1.5)


def test_a_chat_in_one_piece():
    engine = ScriptedEngine("Hello", finish="length")
    answer = ask(engine, "POST", "/api/chat", {"messages": HI, "stream": False})
    body = answer.json()
    assert (body["message"], body["done"], body["done_reason"]) == (
        {"role": "assistant", "content": "Hello"},
        True,
        "length",
    )


def test_generate_answers_or_continues():
    for raw, prompt in ((False, "s:be\nu:hi\na:"), (True, "hi")):
        engine = ScriptedEngine("yes")
        body = {"prompt": "hi", "system": "be", "raw": raw, "stream": False}
        assert ask(engine, "POST", "/api/generate", body).json()["response"] == "yes"
        assert engine.decode(engine.asked[0].prompt.tokens) == prompt


@pytest.mark.parametrize(("path", "body"), [("/api/chat", {}), ("/api/generate", {"model": "toy"})])
def test_an_empty_request_loads_the_model(path: str, body: dict[str, Any]):
    answer = ask(ScriptedEngine(), "POST", path, body)
    assert answer.json()["done_reason"] == "load"


def test_results_of_tools_find_their_calls():
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    history = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_name": "f"},
    ]
    from quire.server.ollama.requests import chat_request
    from quire.server.ollama.schemas import OllamaChatRequest

    sent = chat_request(OllamaChatRequest(messages=history)).messages
    (call,) = sent[1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert sent[2]["tool_call_id"] == call["id"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/api/chat", {"messages": HI, "options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"messages": HI, "options": {"temperature": 9}}, "temperature"),
        ("/api/chat", {"messages": HI, "options": {"num_predict": 0}}, "max_tokens"),
        ("/api/chat", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function.name"),
        ("/api/chat", {"messages": [{"role": "user", "images": 7}]}, "images"),
        ("/api/chat", {"messages": HI, "format": 7}, "format"),
        ("/api/chat", {"messages": HI, "think": "much"}, "think"),
        ("/api/generate", {"prompt": "hi", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "hi", "suffix": "x"}, "fill a gap"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "fill a gap"),
        ("/infill", {}, "input_prefix"),
        ("/infill", {"input_prefix": "a", "input_extra": [{"text": 7}]}, "input_extra[0]"),
    ],
)
def test_a_wrong_field_is_named(path: str, body: dict[str, Any], says: str):
    answer = ask(PlainModel(), "POST", path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert says in (error if path.startswith("/api/") else error["message"])


def test_an_unknown_model_is_404_in_the_protocols_shape():
    answer = ask(ScriptedEngine(), "POST", "/api/chat", {"model": "gpt", "messages": HI})
    assert answer.status_code == 404
    assert "does not exist" in answer.json()["error"]


def test_a_stream_that_fails_ends_with_an_error_line():
    answer = ask(ScriptedEngine("a", RuntimeError("boom")), "POST", "/api/chat", {"messages": HI})
    assert set(lines(answer.text)[-1]) == {"error"}


def test_the_lists_name_the_model():
    (card,) = ask(ScriptedEngine(), "GET", "/api/tags").json()["models"]
    assert card["name"] == card["model"] == "toy"
    assert ask(ScriptedEngine(), "GET", "/api/ps").json()["models"][0]["name"] == "toy"
    assert (
        "completion"
        in ask(ScriptedEngine(), "POST", "/api/show", {"model": "toy"}).json()["capabilities"]
    )
    assert ask(ScriptedEngine(), "GET", "/api/version").json()["version"]


def test_a_gap_is_filled():
    engine = CodeModel("x = 1")
    body = {
        "input_prefix": "a",
        "prompt": "b",
        "input_suffix": "c",
        "input_extra": [{"filename": "f.py", "text": "t"}],
        "n_predict": 8,
    }
    answer = ask(engine, "POST", "/infill", body).json()
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("x = 1", True, "eos")
    assert (
        engine.decode(engine.asked[0].prompt.tokens)
        == "<|fim_prefix|>f.py\nt\nab<|fim_suffix|>c<|fim_middle|>"
    )
    said = frames(ask(CodeModel("x", "y"), "POST", "/infill", body | {"stream": True}).text)
    assert [one["content"] for one in said] == ["x", "y", ""]
    assert said[-1]["tokens_predicted"] == 2
    assert (
        ask(
            CodeModel("z"), "POST", "/api/generate", {"prompt": "a", "suffix": "c", "stream": False}
        ).json()["response"]
        == "z"
    )


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps", "/props", "/slots", "/api/version"])
def test_the_lists_need_the_key(path: str):
    assert (
        ask(None, "GET", path, state=make_state(ScriptedEngine(), api_key="k")).status_code == 401
    )


def test_errors_have_the_form_of_their_protocol():
    for path, body in (("/api/chat", {"messages": 7}), ("/api/nowhere", {})):
        assert isinstance(ask(ScriptedEngine(), "POST", path, body).json()["error"], str)
