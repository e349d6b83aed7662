"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol.

Knows that protocol's shapes. Turns a request into a chat request, and its deltas into content blocks.

    message_start, content_block_start, content_block_delta ..., content_block_stop, message_delta, message_stop
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.api.async_engine import AsyncEngine
from quire.errors import EngineDeadError
from quire.frontend.prompts import Prompt
from quire.server.adapters import model_of
from quire.server.anthropic.content_blocks import (
    ContentBlocks,
    choice_of,
    messages_of,
    text_of,
    tools_of,
)
from quire.server.errors import ENDS, as_api_error, clean, invalid
from quire.server.generation import Generation
from quire.server.limits import take_from_key
from quire.server.openai.chat import chat_prompt, effort_of, generation_of
from quire.server.openai.response_format import of_format
from quire.server.output_delta import OutputDelta
from quire.server.request_body import json_response, prepared, read
from quire.server.schemas import ChatRequest, MessagesRequest
from quire.server.sse import EventStream, event, event_stream, until_disconnect
from quire.server.state import ServerPhase, ServerState, state_of

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
THINKS = {"enabled": True, "adaptive": True, "disabled": False}

Endpoint = Callable[[Request], Awaitable[Response | EventStream]]


def error_body(error: BaseException) -> dict[str, Any]:
    known = as_api_error(error)
    kind = ERRORS.get(known.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": clean(known.message)}}


def error_response(error: BaseException) -> Response:
    known = as_api_error(error)
    return json_response(error_body(error), known.status, known.headers)


def failed(error: BaseException) -> bytes:
    return event(error_body(error))


def with_its_errors(endpoint: Endpoint) -> Endpoint:
    """Make an endpoint report its errors in this protocol's envelope."""

    @wraps(endpoint)
    async def answered(request: Request) -> Response | EventStream:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            raise
        except ENDS:
            raise
        except BaseException as error:
            if isinstance(error, EngineDeadError):
                state_of(request).phase = ServerPhase.DEAD
            return error_response(error)

    return answered


# -- in -------------------------------------------------------------------------------------------
def as_chat(body: MessagesRequest, counted: bool = False) -> ChatRequest:
    """The equivalent chat request. `counted`: only its prompt is used.

    Raises:
        ApiError: 400 that names the field.
    """
    if not counted and (body.max_tokens is None or body.max_tokens < 1):
        raise invalid("`max_tokens` is required and must be at least 1", "max_tokens")
    thinking = (body.thinking or {}).get("type")
    if thinking is not None and thinking not in THINKS:
        raise invalid("`thinking.type` must be enabled, adaptive or disabled", "thinking")
    budget = (body.thinking or {}).get("budget_tokens") if thinking == "enabled" else None
    if budget is not None and (type(budget) is not int or budget < 0):
        raise invalid("`thinking.budget_tokens` must be a whole number of at least 0", "thinking")
    output = body.output_config or {}
    of_format(output.get("format"), "output_config.format")
    messages = [] if body.system is None else [{"role": "system", "content": text_of(body.system, "system")}]  # fmt: skip
    for at, message in enumerate(body.messages):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"`messages[{at}].role` must be user or assistant", f"messages[{at}].role")  # fmt: skip
        messages += messages_of(role, message.get("content"), f"messages[{at}].content")
    goes_on = bool(body.messages) and messages[-1]["role"] == "assistant"  # it begins the answer
    template_kwargs = {} if thinking is None else {"enable_thinking": THINKS[thinking]}
    one = (body.tool_choice or {}).get("disable_parallel_tool_use") is True
    return ChatRequest(
        messages=messages, model=body.model, max_tokens=body.max_tokens, stop=body.stop_sequences,
        stream=body.stream, temperature=body.temperature, top_k=body.top_k, top_p=body.top_p,
        cache_salt=body.cache_salt, chat_template_kwargs=template_kwargs | body.chat_template_kwargs,
        tools=tools_of(body.tools) or None, tool_choice=choice_of(body.tool_choice),
        parallel_tool_calls=not one, include_reasoning=bool(thinking and THINKS[thinking]),
        response_format=output.get("format"), reasoning_effort=effort_of(output.get("effort"), "output_config.effort"), vllm_xargs=body.vllm_xargs,
        kv_transfer_params=body.kv_transfer_params, thinking_token_budget=budget,
        add_generation_prompt=not goes_on, continue_final_message=goes_on,
    )  # fmt: skip


# -- out ------------------------------------------------------------------------------------------
def usage(generation: Generation, details: bool) -> dict[str, Any]:
    """Includes what was read from and written to the prefix cache, if the server reports it; input_tokens excludes it."""
    count = generation.counts[0]
    found = {"input_tokens": count.prompt_tokens, "output_tokens": sum(count.output_tokens)}
    if details:
        found["cache_creation_input_tokens"] = count.created
        found["cache_read_input_tokens"] = count.cached
        found["input_tokens"] -= count.cached + count.created
    return found


def stop_reason_of(delta: OutputDelta, blocks: ContentBlocks) -> dict[str, Any]:
    """The stop reason in this protocol's terms."""
    by = delta.stop_reason if isinstance(delta.stop_reason, str) else None
    reason = "stop_sequence" if by is not None else STOPS.get(delta.finish_reason or "", "end_turn")
    if reason == "end_turn" and any(block["type"] == "tool_use" for block in blocks.done):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": by}


def message(generation: Generation, model: str, content: list[Any], details: bool) -> dict[str, Any]:  # fmt: skip
    return {
        "id": generation.id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(generation, details),
    }


@dataclass(slots=True)
class MessageEventEncoder:
    """Encodes deltas as events."""

    generation: Generation
    model: str
    details: bool
    blocks: ContentBlocks = field(default_factory=ContentBlocks)
    started: bool = False

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        if not self.started:
            self.started = True
            start = message(self.generation, self.model, [], self.details)
            start["usage"]["output_tokens"] = 0
            yield event({"type": "message_start", "message": start})
        yield from self.blocks.add(delta)
        if delta.finish_reason is not None:
            yield from self.blocks.end()
            final_usage = usage(self.generation, self.details)
            yield event(
                {
                    "type": "message_delta",
                    "delta": stop_reason_of(delta, self.blocks),
                    "usage": final_usage,
                }
            )

    def end(self) -> Iterator[bytes]:
        yield event({"type": "message_stop"})


async def generation_for(
    request: Request, body: MessagesRequest, engine: AsyncEngine, state: ServerState
) -> Generation:
    chat = as_chat(body)
    if chat.include_reasoning and engine.front.formats.reasoning is None:
        raise invalid("`thinking`: the format of this model's reasoning is unknown; leave the field out, or start the server with --reasoning-parser NAME", "thinking")  # fmt: skip
    return await generation_of(request, chat, engine, "msg_")


@with_its_errors
async def messages(request: Request) -> Response | EventStream:
    """Answer a conversation, in Anthropic's protocol."""
    state = state_of(request)
    engine = state.serving()
    body = await read(request, MessagesRequest)
    model, adapter = await model_of(request, body.model)
    generation = await prepared(request, generation_for, request, body, engine, state)
    generation.adapter = adapter
    details = state.config.server.enable_prompt_tokens_details
    if body.stream:
        return await event_stream(
            request, generation, MessageEventEncoder(generation, model, details), failed
        )
    (delta,) = await until_disconnect(request.receive, generation.whole())
    blocks = ContentBlocks()
    for _ in (*blocks.add(delta), *blocks.end()):
        pass
    return json_response(
        message(generation, model, blocks.done, details) | stop_reason_of(delta, blocks)
    )


@with_its_errors
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation."""
    state = state_of(request)
    engine = state.serving()
    body = await read(request, MessagesRequest)
    await model_of(request, body.model)
    take_from_key(request)
    prompt = await prepared(request, counted_of, body, engine, state)
    return json_response({"input_tokens": len(prompt.tokens)})


async def counted_of(body: MessagesRequest, engine: AsyncEngine, state: ServerState) -> Prompt:
    return await chat_prompt(as_chat(body, counted=True), engine, state, check=False)
