"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol.

Knows that protocol's shapes. Turns a request into a chat request, and its deltas into content blocks.

    message_start, content_block_start, content_block_delta ..., content_block_stop, message_delta, message_stop
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.responses import Response

from quire.server.answer import GenerationAnswer
from quire.server.anthropic.content_blocks import (
    ContentBlocks,
    choice_of,
    messages_of,
    text_of,
    tools_of,
)
from quire.server.endpoint import RequestContext, route
from quire.server.errors import ApiError, as_api_error, clean, invalid
from quire.server.generation import Generation
from quire.server.limits import take_from_key
from quire.server.openai.chat import chat_prompt, effort_of, generation_of
from quire.server.openai.response_format import of_format
from quire.server.output_delta import OutputDelta
from quire.server.request_body import json_response
from quire.server.schemas import ChatRequest, MessagesRequest
from quire.server.sse import event

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


def error_body(error: ApiError) -> dict[str, Any]:
    kind = ERRORS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": clean(error.message)}}


def error_response(error: ApiError) -> Response:
    return json_response(error_body(error), error.status, error.headers)


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
    for index, message in enumerate(body.messages):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"`messages[{index}].role` must be user or assistant", f"messages[{index}].role")  # fmt: skip
        messages += messages_of(role, message.get("content"), f"messages[{index}].content")
    goes_on = bool(body.messages) and messages[-1]["role"] == "assistant"  # it begins the answer
    template_kwargs = {} if thinking is None else {"enable_thinking": THINKS[thinking]}
    one_call = (body.tool_choice or {}).get("disable_parallel_tool_use") is True
    return ChatRequest(
        messages=messages, model=body.model, max_tokens=body.max_tokens, stop=body.stop_sequences,
        stream=body.stream, temperature=body.temperature, top_k=body.top_k, top_p=body.top_p,
        cache_salt=body.cache_salt, chat_template_kwargs=template_kwargs | body.chat_template_kwargs,
        tools=tools_of(body.tools) or None, tool_choice=choice_of(body.tool_choice),
        parallel_tool_calls=not one_call, include_reasoning=bool(thinking and THINKS[thinking]),
        response_format=output.get("format"), reasoning_effort=effort_of(output.get("effort"), "output_config.effort"), vllm_xargs=body.vllm_xargs,
        kv_transfer_params=body.kv_transfer_params, thinking_token_budget=budget,
        add_generation_prompt=not goes_on, continue_final_message=goes_on,
    )  # fmt: skip


# -- out ------------------------------------------------------------------------------------------
def stop_reason_of(delta: OutputDelta, blocks: ContentBlocks) -> dict[str, Any]:
    """The stop reason in this protocol's terms."""
    by = delta.stop_reason if isinstance(delta.stop_reason, str) else None
    reason = "stop_sequence" if by is not None else STOPS.get(delta.finish_reason or "", "end_turn")
    if reason == "end_turn" and any(block["type"] == "tool_use" for block in blocks.done):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": by}


class MessageAnswer(GenerationAnswer):
    def __init__(self, context: RequestContext, body: MessagesRequest, source: Generation):
        super().__init__(context, body, source)
        self.blocks, self.started = ContentBlocks(), False

    def usage(self) -> dict[str, Any]:
        """Includes what was read from and written to the prefix cache, if the server reports it; input_tokens excludes it."""
        count = self.source.counts[0]
        usage = {"input_tokens": count.prompt_tokens, "output_tokens": sum(count.output_tokens)}
        if self.details:
            usage["cache_creation_input_tokens"] = count.created
            usage["cache_read_input_tokens"] = count.cached
            usage["input_tokens"] -= count.cached + count.created
        return usage

    def message(self) -> dict[str, Any]:
        return {
            "id": self.source.id,
            "type": "message",
            "role": "assistant",
            "content": self.blocks.done,
            "model": self.context.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(),
        }

    async def response(self, deltas: Sequence[OutputDelta]) -> Response:
        (delta,) = deltas
        for _ in (*self.blocks.add(delta), *self.blocks.end()):
            pass
        return json_response(self.message() | stop_reason_of(delta, self.blocks))

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        if not self.started:
            self.started = True
            start = self.message()
            start["usage"]["output_tokens"] = 0
            yield event({"type": "message_start", "message": start})
        yield from self.blocks.add(delta)
        if delta.finish_reason is not None:
            yield from self.blocks.end()
            reason = stop_reason_of(delta, self.blocks)
            yield event({"type": "message_delta", "delta": reason, "usage": self.usage()})

    def end(self) -> Iterator[bytes]:
        yield event({"type": "message_stop"})

    def failed(self, error: BaseException) -> bytes:
        return event(error_body(as_api_error(error)))


@route(MessagesRequest, media="messages")
async def messages(context: RequestContext, body: MessagesRequest) -> MessageAnswer:
    """Answer a conversation, in Anthropic's protocol."""
    chat = as_chat(body)
    formats = context.engine.front.formats
    if chat.include_reasoning and formats.reasoning is None and formats.reasoning_class is None:
        raise invalid("`thinking`: the format of this model's reasoning is unknown; leave the field out, or start the server with --reasoning-parser NAME", "thinking")  # fmt: skip
    return MessageAnswer(context, body, await generation_of(context, chat, "msg_"))


@route(MessagesRequest, pooling=None, media="messages")
async def count_tokens(context: RequestContext, body: MessagesRequest) -> Response:
    """Count the tokens of a conversation."""
    take_from_key(context.request)
    prompt = await chat_prompt(context, as_chat(body, counted=True), check=False)
    return json_response({"input_tokens": len(prompt.tokens)})
