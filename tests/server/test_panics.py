"""A panic of Rust code (a tokenizer's) is no Exception to Python; it fails one request, in JSON."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import pytest
from asgi import ask, browser, frames
from scripted import ScriptedEngine, make_state

from quire.engine.core import EngineCore
from quire.errors import InternalError, QuireError
from quire.protocol.request import Call

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class PanicException(BaseException):
    """As pyo3's."""


class Panicking(ScriptedEngine):
    """Raises `error` where text is tokenized, and where it is generated."""

    def __init__(self, error: BaseException, streamed: bool = False):
        super().__init__()
        self.error, self.streamed = error, streamed

    async def generate(self, prompt, params, request_id):
        if self.streamed:
            yield self.output(prompt, params, request_id, "Hel", False)
        raise self.error

    def encode(self, text, special=True):
        if self.streamed:
            return super().encode(text, special)
        raise self.error


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, "/tokenize"])
def test_a_panic_is_a_500_in_json(path: str):
    body = HI if path in (CHAT, MESSAGES) else {"prompt": "hi"}
    answer = ask(Panicking(PanicException("called `Option::unwrap()`")), "POST", path, body)
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/json"
    assert (
        answer.json()["error"]["message"]
        == "the server failed on this request; see the server's log"
    )
    if path == MESSAGES:
        assert answer.json()["type"] == "error"


def test_a_panic_in_a_stream_ends_it_with_an_error():
    engine = Panicking(PanicException("called `Option::unwrap()`"), streamed=True)
    told = frames(ask(engine, "POST", CHAT, {**HI, "stream": True}).text)
    assert told[-1] == "[DONE]"
    assert told[-2]["error"]["code"] == 500


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_exits_and_cancellations_are_not_caught(kind: type[BaseException]):
    async def go() -> None:
        state = make_state(Panicking(kind()))
        async with browser(state) as client:
            await client.post("/tokenize", json={"prompt": "hi"})

    with pytest.raises(kind):
        asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_an_internal_error_stays_in_the_log(
    stream: bool, caplog: pytest.LogCaptureFixture
):
    engine = ScriptedEngine(InternalError("KeyError: secret"))
    answer = ask(engine, "POST", CHAT, {**HI, "stream": stream})
    assert "secret" not in answer.text
    (incident,) = re.findall(r"see the server's log under (\w{8})", answer.text)
    assert f"failure {incident}: InternalError: KeyError: secret" in caplog.text


def test_an_engine_function_reports_only_errors_that_are_written_for_clients():
    kinds = {InternalError("a"): "internal", KeyError("b"): "internal", QuireError("c"): "reported"}
    for error, kind in kinds.items():

        def fail(error: Exception = error) -> None:
            raise error

        core = SimpleNamespace(functions={"f": fail}, caller=0)
        assert EngineCore._reply(core, Call(1, "f", [])).error_kind == kind  # type: ignore[arg-type]
