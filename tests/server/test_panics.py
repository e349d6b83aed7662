"""A panic of Rust code (a tokenizer's) is no Exception to Python; it fails one request, in JSON."""

from __future__ import annotations

import asyncio

import pytest
from asgi import ask, browser, frames
from scripted import ScriptedEngine, make_state

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


def test_a_panic_within_a_stream_ends_it_with_an_error():
    engine = Panicking(PanicException("called `Option::unwrap()`"), streamed=True)
    told = frames(ask(engine, "POST", CHAT, {**HI, "stream": True}).text)
    assert told[-1] == "[DONE]"
    assert told[-2]["error"]["code"] == 500


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_ends_the_program_or_the_task_passes(kind: type[BaseException]):
    async def go() -> None:
        state = make_state(Panicking(kind()))
        async with browser(state) as client:
            await client.post("/tokenize", json={"prompt": "hi"})

    with pytest.raises(kind):
        asyncio.run(go())
