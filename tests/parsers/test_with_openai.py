"""What agents do, through the openai package against the embedded model: calls, forms, thoughts, and company."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from test_conversation import QUESTION, WEATHER, tool

from quire.frontend.untrusted_templates import UntrustedTemplateRenderer
from quire.server.app import build_app
from quire.server.state import ServerState

openai = pytest.importorskip("openai")

Work = Callable[[Any], Awaitable[None]]
HELLO = {"role": "user", "content": "Hello!"}
SUM = {"role": "user", "content": "What is 12 + 7?"}
TWO = {"role": "user", "content": "What is the weather in Paris and in Rome?"}
PERSON = "Extract name, age and city as JSON: Ada Baker is 30 years old and lives in Rome."


def talk(state: ServerState, work: Work) -> None:
    async def main() -> None:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(build_app(state)))
        async with openai.AsyncOpenAI(base_url="http://server/v1", api_key="x", http_client=http, max_retries=0) as client:  # fmt: skip
            await asyncio.wait_for(work(client), 60)

    asyncio.run(main())


def asked(*messages: Any, **body: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": list(messages), "temperature": 0, "max_tokens": 100, **body}


def calls_of(message: Any) -> list[tuple[str, Any]]:
    functions = [call.function for call in message.tool_calls or []]
    return [(one.name, json.loads(one.arguments)) for one in functions]


async def gathered(client: Any, body: dict[str, Any]) -> Any:
    """A stream, put together by the client."""
    async with client.chat.completions.stream(**body) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_completion()


def test_a_call_its_result_and_the_answer(state: ServerState):
    async def work(client: Any) -> None:
        body = asked(QUESTION, tools=[WEATHER])
        whole = await client.chat.completions.create(**body)
        for found in (whole, await gathered(client, body)):
            assert calls_of(found.choices[0].message) == [("get_weather", {"city": "Paris"})]
            assert found.choices[0].finish_reason == "tool_calls"
        message = whole.choices[0].message
        result = {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "content": '{"sky": "rainy", "degrees": 7}',
        }
        history = [QUESTION, message.model_dump(exclude_none=True), result]
        second = await client.chat.completions.create(**asked(*history, tools=[WEATHER]))
        assert "Paris" in second.choices[0].message.content
        assert not second.choices[0].message.tool_calls

    talk(state, work)


def test_calls_at_once(state: ServerState):
    body = asked(TWO, tools=[WEATHER], tool_choice="required", reasoning_effort="none")

    async def work(client: Any) -> None:
        whole = await client.chat.completions.create(**body)
        streamed = await gathered(client, body)
        for found in (whole, streamed):
            message = found.choices[0].message
            assert calls_of(message) == [("get_weather", {"city": c}) for c in ("Paris", "Rome")]
            assert len({call.id for call in message.tool_calls}) == 2
            assert found.choices[0].finish_reason == "tool_calls"
        one = await client.chat.completions.create(**body, parallel_tool_calls=False)
        assert calls_of(one.choices[0].message) == [("get_weather", {"city": "Paris"})]

    talk(state, work)


def test_thoughts_are_streamed_before_the_answer(state: ServerState):
    async def work(client: Any) -> None:
        kinds, texts = [], {"reasoning": "", "content": ""}
        body = asked(SUM, stream=True, stream_options={"include_usage": True})
        async for chunk in await client.chat.completions.create(**body):
            for choice in chunk.choices:
                for kind in texts:
                    if new := getattr(choice.delta, kind, None):
                        kinds.append(kind)
                        texts[kind] += new
        # The number of pieces depends on timing: one event has all that came since the last one.
        assert set(kinds) == {"reasoning", "content"}
        assert kinds == sorted(kinds, reverse=True)
        whole = await client.chat.completions.create(**asked(SUM))
        message = whole.choices[0].message
        assert (message.reasoning, message.content) == (texts["reasoning"], texts["content"])
        assert chunk.usage == whole.usage
        assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens  # fmt: skip

    talk(state, work)


def test_a_pydantic_schema_is_parsed(state: ServerState):
    pydantic = pytest.importorskip("pydantic")
    person = pydantic.create_model("Person", name=(str, ...), age=(int, ...), city=(str, ...))
    city = pydantic.create_model("get_weather", city=(str, ...))
    ada = {"role": "user", "content": PERSON}

    async def work(client: Any) -> None:
        found = await client.chat.completions.parse(**asked(ada, response_format=person))
        assert found.choices[0].message.parsed == person(name="Ada Baker", age=30, city="Rome")
        # The package makes its tools strict.
        tools = [openai.pydantic_function_tool(city)]
        found = await client.chat.completions.parse(**asked(QUESTION, tools=tools))
        (call,) = found.choices[0].message.tool_calls
        assert call.function.parsed_arguments == city(city="Paris")
        # With both, either may come.
        both = await client.chat.completions.parse(**asked(QUESTION, tools=tools, response_format=person))  # fmt: skip
        assert both.choices[0].message.tool_calls[0].function.parsed_arguments == city(city="Paris")

    talk(state, work)


def of_kinds() -> list[dict[str, Any]]:
    """Ten kinds of requests, some with thoughts before what is tool_constraint."""
    strict = tool("get_weather", "Get the weather of a city.", city="string")
    strict["function"]["strict"] = True
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    ours = [{"choice": ["north", "south"]}, {"regex": r"[0-9]{3}-[a-f]{2}"}, {"grammar": 'root ::= "<" [xyz]+ ">"'}]  # fmt: skip
    return [
        asked(HELLO), asked(SUM), asked(QUESTION, tools=[WEATHER]), asked(QUESTION, tools=[strict]),
        asked(HELLO, tools=[WEATHER], tool_choice="required", reasoning_effort="none"),
        asked(HELLO, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, max_tokens=30),
        *(asked(SUM, extra_body={"structured_outputs": one}) for one in ours),
        asked(HELLO, response_format={"type": "json_object"}, reasoning_effort="none", max_tokens=30),
    ]  # fmt: skip


async def told(client: Any, body: dict[str, Any]) -> Any:
    found = await client.chat.completions.create(**body)
    (choice,) = found.choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return message.reasoning, message.content, calls, choice.finish_reason


def test_constraints_apply_only_to_their_own_request(state: ServerState):
    """32 requests at once answer as each does alone."""

    async def work(client: Any) -> None:
        kinds = of_kinds()
        alone = [await told(client, body) for body in kinds]
        assert len({repr(one) for one in alone}) > 7
        many = [at % len(kinds) for at in range(32)]
        together = await asyncio.gather(*(told(client, kinds[at]) for at in many))
        for at, found in zip(many, together, strict=True):
            assert found == alone[at], kinds[at]

    talk(state, work)


def bad_ones() -> dict[str, tuple[str, dict[str, Any]]]:
    """What is wrong, the parameter that the error names, and the request."""
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    wrong = tool("odd", "Odd.", a="integer")
    wrong["function"]["parameters"] = odd

    def ours(**form: Any) -> dict[str, Any]:
        return asked(HELLO, extra_body={"structured_outputs": form})

    def schema(given: Any) -> dict[str, Any]:
        return asked(HELLO, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": given}})  # fmt: skip

    return {
        "uniqueItems": ("response_format", schema(odd)),
        "json_schema.schema": ("response_format", schema(7)),
        "regex": ("structured_outputs", ours(regex="(a")),
        "grammar": ("structured_outputs", ours(grammar="root ::= nothing")),
        "exactly one of": ("structured_outputs", ours(regex="a", choice=["a"])),
        "does not parse": ("chat_template", asked(HELLO, extra_body={"chat_template": "{% if %}"})),
        "no sir": ("messages", asked(HELLO, extra_body={"chat_template": "{{ raise_exception('no sir') }}"})),
        "letters, digits": ("tools", asked(HELLO, tools=[{"type": "function", "function": {"name": "a b"}}])),
        "tools: ": ("tools", asked(HELLO, tools=[wrong], tool_choice="required")),
    }  # fmt: skip


def test_an_invalid_constraint_fails_alone(state: ServerState):
    async def refused(client: Any, says: str, parameter: str, body: dict[str, Any]) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**body)
        assert says in caught.value.message
        assert caught.value.param == parameter, caught.value

    async def work(client: Any) -> None:
        alone = await told(client, asked(SUM))
        bad = [refused(client, says, *one) for says, one in bad_ones().items()]
        good = [told(client, asked(SUM)) for _ in bad]
        found = await asyncio.gather(*(one for pair in zip(bad, good, strict=True) for one in pair))
        assert found[1::2] == [alone] * len(good)

    server = state.config.server
    object.__setattr__(server, "trust_request_chat_template", True)
    try:
        talk(state, work)
    finally:
        object.__setattr__(server, "trust_request_chat_template", False)
        state.untrusted.close()
        state.untrusted = UntrustedTemplateRenderer()
