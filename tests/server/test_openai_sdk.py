"""OpenAI's own client on this application, without a socket: what it reads, and which exceptions it raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from scripted import ScriptedEngine, make_state, serve

from quire.errors import EngineDeadError, QueueFull, ValidationError
from quire.server.app import build_app
from quire.server.state import ServerPhase, ServerState

openai = pytest.importorskip("openai")

HI = [{"role": "user", "content": "Hi"}]


def with_client(
    state: ServerState, work: Callable[[Any], Awaitable[Any]], key: str = "k", **options: Any
) -> Any:
    async def go() -> Any:
        transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=False)
        async with openai.AsyncOpenAI(
            base_url="http://server/v1", api_key=key, max_retries=0, http_client=httpx.AsyncClient(transport=transport), **options
        ) as client:  # fmt: skip
            return await asyncio.wait_for(work(client), 60)

    return asyncio.run(go())


def test_models():
    async def work(client: Any) -> None:
        listed = [model async for model in client.models.list()]
        assert [model.id for model in listed] == ["toy", "also"]
        one = await client.models.retrieve("also")
        assert (one.id, one.object) == ("also", "model")
        assert one.created > 1_600_000_000
        with pytest.raises(openai.NotFoundError, match="nope"):
            await client.models.retrieve("nope")

    with_client(make_state(ScriptedEngine(), served_model_name=["toy", "also"]), work)


def test_chat_whole_and_streamed_are_the_same():
    async def work(client: Any) -> None:
        asked = {"model": "toy", "messages": HI, "max_tokens": 8}
        whole = await client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=3)
        assert [choice.message.content for choice in whole.choices] == ["Hello"] * 2
        assert whole.choices[0].finish_reason == "stop"
        for position, letter in zip(whole.choices[0].logprobs.content, "Hello", strict=True):
            assert position.token == letter
            assert position.bytes == list(letter.encode())
            assert position.logprob == -0.5
            assert [top.token for top in position.top_logprobs] == [letter, *(chr(ord(letter) + more) for more in (1, 2))]  # fmt: skip
        assert whole.usage.completion_tokens == 10
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 10
        stream = await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage.completion_tokens == 5
        assert len({c.id for c in chunks}) == 1

    with_client(make_state(ScriptedEngine()), work)


def test_the_clients_stream_helper_collects_a_stream():
    async def work(client: Any) -> None:
        async with client.chat.completions.stream(model="toy", messages=HI) as stream:
            kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content == "Hello"

    with_client(make_state(ScriptedEngine()), work)


def test_completions():
    async def work(client: Any) -> None:
        asked = {"model": "toy", "max_tokens": 8}
        whole = await client.completions.create(**asked, prompt=["a", "b"], n=2, logprobs=2)
        assert [choice.text for choice in whole.choices] == ["Hello"] * 4
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        said = whole.choices[0].logprobs
        assert said.tokens == list("Hello")
        assert said.token_logprobs == [-0.5] * 5
        assert said.text_offset == [0, 1, 2, 3, 4]
        assert said.top_logprobs[0] == {"H": -0.5, "I": -1.5}
        stream = await client.completions.create(
            **asked, prompt="a", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks if c.choices) == "Hello"
        assert chunks[-1].usage.completion_tokens == 5
        echoed = await client.completions.create(**asked, prompt="a", echo=True)
        assert echoed.choices[0].text == "aHello"

    with_client(make_state(ScriptedEngine()), work)


def test_responses():
    async def work(client: Any) -> None:
        whole = await client.responses.create(model="toy", input="Hi")
        assert whole.output_text == "Hello"
        assert whole.usage.output_tokens == 5
        async with client.responses.stream(model="toy", input="Hi") as stream:
            events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "Hello"
        assert [event.sequence_number for event in events] == list(range(len(events)))

    with_client(make_state(ScriptedEngine()), work)


def test_extra_fields_go_through():
    engine = ScriptedEngine()

    async def work(client: Any) -> None:
        more = {"top_k": 3, "min_p": 0.1, "ignore_eos": True}
        await client.chat.completions.create(model="toy", messages=HI, seed=4, extra_body=more)

    with_client(make_state(engine), work)
    params = engine.asked[0].params
    assert (params.top_k, params.min_p, params.ignore_eos, params.seed) == (3, 0.1, True, 4)


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"model": "nope"}, "NotFoundError", "model"),
        ({"temperature": -1}, "BadRequestError", "temperature"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"max_tokens": "many"}, "BadRequestError", "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "BadRequestError", "input_tokens"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "BadRequestError", "messages"),
    ],
)
def test_mistakes_are_the_clients_exceptions(asked: dict[str, Any], kind: str, param: str):
    async def work(client: Any) -> None:
        with pytest.raises(getattr(openai, kind)) as refused:
            await client.chat.completions.create(**{"model": "toy", "messages": HI} | asked)
        assert refused.value.param == param
        assert refused.value.type == kind or kind == "BadRequestError"
        assert refused.value.body["message"]

    with_client(make_state(ScriptedEngine()), work)


@pytest.mark.parametrize(
    ("failure", "kind", "status"),
    [
        (ValidationError("no", parameter="seed"), "BadRequestError", 400),
        (QueueFull("full"), "InternalServerError", 503),
        (EngineDeadError("gone"), "InternalServerError", 500),
        (TimeoutError("late"), "APIStatusError", 408),
        (KeyError("ours"), "InternalServerError", 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_are_the_clients_exceptions(
    failure: Exception, kind: str, status: int, stream: bool
):
    async def work(client: Any) -> None:
        with pytest.raises(getattr(openai, kind)) as refused:
            await client.chat.completions.create(model="toy", messages=HI, stream=stream)
        assert refused.value.status_code == status

    with_client(make_state(ScriptedEngine(failure)), work)


def test_a_failure_in_mid_stream_is_an_exception():
    async def work(client: Any) -> None:
        got = []

        async def listen() -> None:
            async for chunk in stream:
                got.append(chunk.choices[0].delta.content)

        stream = await client.chat.completions.create(model="toy", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="has stopped"):
            await listen()
        assert "Hel" in got

    with_client(make_state(ScriptedEngine("Hel", EngineDeadError("gone"))), work)


def test_keys_limits_and_phases():
    async def refused(client: Any) -> Any:
        with pytest.raises(openai.APIStatusError) as found:
            await client.chat.completions.create(model="toy", messages=HI)
        return found.value

    keyed = make_state(ScriptedEngine(), api_key=["right"])
    assert isinstance(with_client(keyed, refused, "wrong"), openai.AuthenticationError)
    loading = make_state(None)
    assert with_client(loading, refused).status_code == 503
    draining = make_state(ScriptedEngine())
    draining.phase = ServerPhase.DRAINING
    said = with_client(draining, refused)
    assert (said.status_code, said.response.headers["retry-after"]) == (503, "30")
    small = make_state(ScriptedEngine(), max_body_bytes=10)
    assert with_client(small, refused).status_code == 413


def test_a_rate_limit_is_the_clients_exception(tmp_path: Any):
    keys = tmp_path / "keys.json"
    keys.write_text('[{"name": "a", "key": "k", "requests_per_minute": 1}]')

    async def work(client: Any) -> None:
        await client.chat.completions.create(model="toy", messages=HI)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="toy", messages=HI)
        assert int(refused.value.response.headers["retry-after"]) > 0

    with_client(make_state(ScriptedEngine(), api_key_file=str(keys)), work)


def test_the_client_retries_after_retry_after():
    state = make_state(None)

    async def work(client: Any) -> None:
        async def later() -> None:
            await asyncio.sleep(0.2)
            serve(state, ScriptedEngine())

        ready = asyncio.ensure_future(later())
        again = client.with_options(max_retries=3)
        found = await again.chat.completions.create(model="toy", messages=HI)
        assert found.choices[0].message.content == "Hello"
        await ready

    with_client(state, work)
