"""POST /v1/chat/completions/batch: answers several conversations, one choice each.

Knows how the request differs from a chat request. Each conversation is a generation of its own: their prompts may
differ in whether reasoning is open, so each has its own reader and parameters.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from quire import env
from quire.server.answer_size import check_answer_size
from quire.server.endpoint import RequestContext, route
from quire.server.errors import invalid
from quire.server.generation import Generation
from quire.server.limits import completions_of, take_from_key
from quire.server.openai.chat import ChatAnswer, chat_prompt
from quire.server.openai.chat_output import output_reader
from quire.server.openai.chunks import envelope, load_report
from quire.server.openai.sampling_params import chat_params
from quire.server.openai.tools import ToolChoice
from quire.server.output_delta import OutputDelta
from quire.server.prompts import MOST_MESSAGES
from quire.server.schemas import BatchChatRequest, ChatRequest
from quire.server.streaming_json import json_answer, listed

NOT_IN_A_BATCH = ("stream", "tools", "use_beam_search", "prompt_logprobs", "functions", "function_call")  # fmt: skip
LARGE_BATCH = 256
"""Conversations from which on a thread encodes the answer."""


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
    if len(body.messages) > (limit := env.get("MAX_COMPLETION_PROMPTS")):
        raise invalid(f"`messages` has {len(body.messages)} conversations; the limit is {limit}", "messages")  # fmt: skip
    if (count := sum(map(len, body.messages))) > MOST_MESSAGES:
        raise invalid(f"`messages` has {count} messages in all; the limit is {MOST_MESSAGES}: send fewer conversations", "messages")  # fmt: skip
    fields = {name: getattr(body, name) for name in ChatRequest.__struct_fields__}
    return [ChatRequest(**fields | {"messages": messages}) for messages in body.messages]


@dataclass(slots=True)
class ChatBatch:
    """The answers to all conversations, each with its generation."""

    answers: list[ChatAnswer]

    async def whole(self) -> list[OutputDelta]:
        """The output of each conversation; if one fails, the others are aborted."""
        tasks = list[asyncio.Task[list[OutputDelta]]]()
        try:
            for answer in self.answers:
                tasks.append(asyncio.create_task(answer.source.whole()))
                await asyncio.sleep(0)  # let other tasks of the loop run
            return [delta for (delta,) in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class BatchAnswer:
    id: str
    source: ChatBatch

    def choice(self, index: int, delta: OutputDelta, large: bool) -> dict[str, Any]:
        return self.source.answers[index].choice(delta, large) | {"index": index}

    async def response(self, deltas: list[OutputDelta]) -> Response:
        answers = self.source.answers
        first, context = answers[0].source, answers[0].context
        large = len(deltas) >= LARGE_BATCH or first.is_large(deltas)
        usage: dict[str, Any] = {}
        for answer in answers:
            add(usage, answer.usage())
        items = partial(map, partial(self.choice, large=large), range(len(deltas)), deltas)
        whole = envelope(ChatAnswer.kind, self.id, first, context, listed(items, large), usage)
        whole |= {"prompt_logprobs": None, "kv_transfer_params": None}
        return json_answer(whole, large, context.state.answering, headers=load_report(context))


def add(total: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            add(total.setdefault(name, {}), value)
        else:
            total[name] = value if value is None else total.get(name, 0) + value


@route(BatchChatRequest, media="messages")
async def batch(context: RequestContext, body: BatchChatRequest) -> BatchAnswer:
    """Answer several conversations, one choice each."""
    state, engine, bodies = context.state, context.engine, conversations_of(body)
    params = chat_params(bodies[0], engine.inputs.defaults)
    take_from_key(context.request, completions_of(len(bodies), params, state))
    public_id, answers = context.new_id("chatcmpl-", body), list[ChatAnswer]()
    for index, chat in enumerate(bodies):
        prompt = await chat_prompt(context, chat)
        params = chat_params(chat, engine.inputs.defaults)
        params, reader = await output_reader(chat, ToolChoice("none", []), params, prompt, context)
        generation = Generation(context, f"{public_id}-{index}", chat, [prompt], params, reader)
        answers.append(ChatAnswer(context, chat, generation))
        if not state.texts.inside:
            await asyncio.sleep(0)  # let other tasks of the loop run
    prompts = [answer.source.prompts[0] for answer in answers]
    # of all together: their parameters have the same numbers
    check_answer_size(prompts, params, None, engine, state.config.server.max_answer_entries)
    return BatchAnswer(public_id, ChatBatch(answers))
