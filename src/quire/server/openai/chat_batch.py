"""POST /v1/chat/completions/batch: answers several conversations, one choice each.

Knows how the request differs from a chat request. Each conversation is a generation of its own: their prompts may
differ in whether reasoning is open, so each has its own reader and parameters.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire import env
from quire.api.async_engine import AsyncEngine
from quire.server.adapters import model_of
from quire.server.answer_size import check_answer_size
from quire.server.errors import invalid
from quire.server.generation import Generation
from quire.server.limits import completions_of, take_from_key
from quire.server.middleware import TENANT
from quire.server.openai import logprobs as shapes
from quire.server.openai.chat import ChatChoiceBuilder, chat_prompt
from quire.server.openai.chat_output import make_output_reader
from quire.server.openai.chunks import data_parallel_rank, load_report, new_id, priority
from quire.server.openai.sampling_params import chat_params
from quire.server.openai.tools import ToolChoice
from quire.server.output_delta import OutputDelta
from quire.server.prompts import MOST_MESSAGES
from quire.server.request_body import prepared, read
from quire.server.schemas import BatchChatRequest, ChatRequest
from quire.server.sse import until_disconnect
from quire.server.state import state_of
from quire.server.streaming_json import json_answer, listed

NOT_IN_A_BATCH = ("stream", "tools", "use_beam_search", "prompt_logprobs", "functions", "function_call")  # fmt: skip
LARGE_BATCH = 256
"""Conversations from which on a thread encodes the answer."""


@dataclass(slots=True)
class BatchedChat:
    """One conversation of a batch."""

    body: ChatRequest
    generation: Generation


def conversations_of(body: BatchChatRequest) -> list[ChatRequest]:
    """A chat request for each conversation.

    Raises:
        ApiError: 400 that names the field.
    """
    for name in NOT_IN_A_BATCH:
        if getattr(body, name):
            raise invalid(f"`{name}` is not supported in a batch; leave it out, or send each conversation to /v1/chat/completions", name)  # fmt: skip
    if body.n != 1 or (body.best_of or 1) != 1:
        raise invalid("`n` is not supported in a batch: each conversation has one choice", "n")
    if body.tool_choice not in (None, "none"):
        raise invalid("`tool_choice` is not supported in a batch; leave it out", "tool_choice")
    if not body.messages:
        raise invalid("`messages` is empty: it is a list of conversations", "messages")
    if len(body.messages) > (most := env.get("MAX_COMPLETION_PROMPTS")):
        raise invalid(f"`messages` has {len(body.messages)} conversations; the limit is {most}", "messages")  # fmt: skip
    if (count := sum(map(len, body.messages))) > MOST_MESSAGES:
        raise invalid(f"`messages` has {count} messages in all; the limit is {MOST_MESSAGES}: send fewer conversations", "messages")  # fmt: skip
    fields = {name: getattr(body, name) for name in ChatRequest.__struct_fields__}
    return [ChatRequest(**fields | {"messages": messages}) for messages in body.messages]


async def generations_of(
    request: Request, body: BatchChatRequest, engine: AsyncEngine
) -> list[BatchedChat]:
    """Check and render all conversations.

    Raises:
        ApiError, ValidationError: the request is invalid.
    """
    state, bodies = state_of(request), conversations_of(body)
    params = chat_params(bodies[0], engine.inputs.defaults)
    take_from_key(request, completions_of(len(bodies), params, state))
    public_id, conversations = new_id("chatcmpl-", request, body), list[BatchedChat]()
    for at, chat in enumerate(bodies):
        prompt = await chat_prompt(chat, engine, state)
        params = chat_params(chat, engine.inputs.defaults)
        reader = make_output_reader(chat, ToolChoice("none", []), params, prompt, state, engine)
        generation = Generation(
            state, engine, f"{public_id}-{at}", [prompt], params, priority(request, body), body.timeout,
            tenant=request.scope.get(TENANT), reader=reader, data_parallel_rank=data_parallel_rank(request),
        )  # fmt: skip
        conversations.append(BatchedChat(chat, generation))
        if not state.texts.inside:
            await asyncio.sleep(0)  # let other tasks of the loop run
    prompts = [one.generation.prompts[0] for one in conversations]
    # of all together: their parameters have the same numbers
    check_answer_size(prompts, params, None, engine, state.config.server.max_answer_entries)
    return conversations


async def answers_of(conversations: list[BatchedChat]) -> list[OutputDelta]:
    """The output of each conversation; if one fails, the others are aborted."""
    tasks = list[asyncio.Task[list[OutputDelta]]]()
    try:
        for one in conversations:
            tasks.append(asyncio.create_task(one.generation.whole()))
            await asyncio.sleep(0)  # let other tasks of the loop run
        return [delta for (delta,) in await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def choice_of(conversation: BatchedChat, delta: OutputDelta, at: int, name: shapes.Name, role: str, large: bool) -> dict[str, Any]:  # fmt: skip
    builder = ChatChoiceBuilder(conversation.body, conversation.generation, name, role)
    return builder.choice(delta, large) | {"index": at}


def usage_of(conversations: list[BatchedChat], details: bool) -> dict[str, Any]:
    """The sum of their usages."""
    total: dict[str, Any] = {}
    for one in conversations:
        add(total, one.generation.usage(details))
    return total


def add(total: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            add(total.setdefault(name, {}), value)
        else:
            total[name] = value if value is None else total.get(name, 0) + value


async def batch(request: Request) -> Response:
    """Answer several conversations, one choice each."""
    state = state_of(request)
    engine, server = state.serving(), state.config.server
    body = await read(request, BatchChatRequest)
    model, adapter = await model_of(request, body.model)
    conversations = await prepared(request, generations_of, request, body, engine)
    for one in conversations:
        one.generation.adapter = adapter
    created = int(time.time())
    deltas = await until_disconnect(request.receive, answers_of(conversations))
    as_ids = body.return_tokens_as_token_ids
    as_ids = server.return_tokens_as_token_ids if as_ids is None else as_ids
    large = len(deltas) >= LARGE_BATCH or conversations[0].generation.is_large(deltas)
    choice = partial(
        choice_of,
        name=shapes.naming(as_ids, engine.token_text),
        role=server.response_role,
        large=large,
    )
    whole = {
        "id": conversations[0].generation.id.removesuffix("-0"),
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": listed(partial(map, choice, conversations, deltas, range(len(deltas))), large),
        "service_tier": None,
        "system_fingerprint": state.fingerprint,
        "usage": usage_of(conversations, server.enable_prompt_tokens_details),
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }
    return json_answer(whole, large, state.answering, headers=load_report(request, state))
