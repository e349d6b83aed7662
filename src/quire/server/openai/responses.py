"""POST /v1/responses: OpenAI's Responses protocol, for text.

Knows that protocol's shapes. Turns a request into a chat request, and its deltas into output items. A stored response has its
conversation, which a later request continues (`previous_response_id`); `background.py` runs one that no client waits for.

    response.created, .in_progress, .output_item.added, .content_part.added, .output_text.delta ...,
    .output_text.done, .content_part.done, .output_item.done, response.completed (or .incomplete, .failed)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from quire.config.unsupported import RESPONSES_FIELDS, RESPONSES_WITHOUT_EFFECT
from quire.frontend.media.content_parts import MediaPart
from quire.frontend.media.processed_cache import ReadMedia
from quire.frontend.media.prompt_reader import need_media
from quire.logging import get_logger
from quire.server.answer import GenerationAnswer
from quire.server.endpoint import RequestContext, route
from quire.server.errors import ApiError, as_api_error, clean, invalid
from quire.server.generation import Generation
from quire.server.openai import logprobs as shapes
from quire.server.openai.background import BackgroundAnswer
from quire.server.openai.chat import effort_of, generation_of
from quire.server.openai.response_format import of_format
from quire.server.openai.responses_items import (
    ResponseItems,
    choice_of,
    messages_of,
    namespaces_of,
    tools_of,
)
from quire.server.openai.stored_response_routes import owner_of, why_not_stored
from quire.server.output_delta import OutputDelta
from quire.server.request_body import SHORT_BODY, SIZE
from quire.server.response_store import ITEM_OVERHEAD, OVERHEAD, StoredResponse
from quire.server.schemas import ChatRequest, GenerationFields, ResponsesRequest
from quire.server.sse import event
from quire.server.tokenizer_pool import run_alone

log = get_logger(__name__)

LOGPROBS = "message.output_text.logprobs"
"""The supported value of `include`; the others concern stored responses and tools that run on a server."""

INCOMPLETE = {"length": "max_output_tokens", "abort": "aborted"}
"""Finish reason -> why the response is incomplete."""


# -- in -------------------------------------------------------------------------------------------
def refuse_unsupported(body: ResponsesRequest) -> None:
    """Raises ApiError 400 that names the field."""
    for name, remedy in RESPONSES_FIELDS.items():
        if getattr(body, name) not in (None, False):
            raise invalid(f"`{name}` is not supported yet: {remedy}", name)
    for name, why in RESPONSES_WITHOUT_EFFECT.items():
        if getattr(body, name) not in (None, "auto", "default"):
            log.warning_every(name, 3600, "`%s` of /v1/responses has no effect: %s", name, why)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise invalid("`max_output_tokens` must be at least 1", "max_output_tokens")
    form = (body.text or {}).get("format")
    if of_format(form, "text.format") is not None and body.structured_outputs is not None:
        raise invalid("`text.format` and `structured_outputs`: an output has one constraint; give only one of them", "structured_outputs")  # fmt: skip
    if body.background and not body.store:
        raise invalid("`background` needs `store`: the response is fetched later", "background")
    if body.truncation not in (None, "disabled"):
        raise invalid("`truncation` must be 'disabled'", "truncation")


def conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions and input as chat messages.

    Raises:
        ApiError: 400 that names the place.
    """
    start = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*start, {"role": "user", "content": body.input}]
    messages = messages_of(body.input)
    if not messages:
        raise invalid("`input` is empty", "input")
    return [*start, *messages]


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The equivalent chat request."""
    refuse_unsupported(body)
    return ChatRequest(
        **{name: getattr(body, name) for name in GenerationFields.__struct_fields__},
        messages=conversation(body), max_completion_tokens=body.max_output_tokens,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=effort_of((body.reasoning or {}).get("effort"), "reasoning.effort"),
        include_reasoning=body.include_reasoning, tools=tools_of(body.tools) or None,
        tool_choice=choice_of(body.tool_choice, body.tools), parallel_tool_calls=body.parallel_tool_calls,
        logprobs=wants_logprobs(body), top_logprobs=body.top_logprobs,
        response_format=(body.text or {}).get("format"),
    )  # fmt: skip


def wants_logprobs(body: ResponsesRequest) -> bool:
    return LOGPROBS in body.include or bool(body.top_logprobs)


# -- out ------------------------------------------------------------------------------------------
class ResponseAnswer(GenerationAnswer):
    """The answer to a request. kept: where it is stored when it has ended; None: nowhere."""

    def __init__(self, context: RequestContext, body: ResponsesRequest, source: Generation, kept: StoredResponse | None = None):  # fmt: skip
        super().__init__(context, body, source)
        self.kept = kept
        self.items = self.new_items(self.event, self.logprobs)
        self.number = 0
        """Number of events so far."""

    def object(self, status: str, output: list[Any], error: Any = None, why: str | None = None) -> dict[str, Any]:  # fmt: skip
        """The response object; `why`: the reason if it is incomplete."""
        body, source = self.body, self.source
        return {
            "id": source.id,
            "object": "response",
            "created_at": source.created,
            "status": status,
            "background": body.background,
            "error": error,
            "incomplete_details": None if why is None else {"reason": why},
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata,
            "model": self.context.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning,
            "prompt_cache_key": body.prompt_cache_key,
            "service_tier": body.service_tier or "auto",
            "store": self.kept is not None,
            "temperature": source.params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": source.params.top_p,
            "truncation": "disabled",
            "usage": None if status in ("queued", "in_progress") else self.usage(),
            "user": body.user,
        }

    def usage(self) -> dict[str, Any]:
        count, reader = self.source.counts[0], self.source.reader
        output = sum(count.output_tokens)
        resumed = {"resumed": True} if count.resumed else {}
        return resumed | {
            "input_tokens": count.prompt_tokens,
            "input_tokens_details": self.source.cached(),
            "output_tokens": output,
            "output_tokens_details": {
                "reasoning_tokens": 0 if reader is None else reader.reasoning_tokens
            },
            "total_tokens": count.prompt_tokens + output,
        }

    def new_items(
        self, event: Callable[..., bytes], logprobs: Callable[[OutputDelta], Any]
    ) -> ResponseItems:
        item_id = self.source.id.removeprefix("resp_")
        is_recorded = self.body.background and self.context.state.journal is not None
        return ResponseItems(item_id, event, logprobs, namespaces_of(self.body.tools), is_recorded)

    def logprobs(self, delta: OutputDelta, large: bool = False) -> Any:
        """A list; for a large answer one that is encoded while it is sent."""
        if delta.logprobs is None or not wants_logprobs(self.body):
            return []
        top = self.body.top_logprobs or 0
        return shapes.chat(delta.tokens, delta.logprobs, top, self.name, large)["content"]

    def ended(self, delta: OutputDelta, output: list[dict[str, Any]]) -> dict[str, Any]:
        reason = INCOMPLETE.get(delta.finish_reason or "")
        metrics = self.source.metrics
        made = self.object(status_of(delta), output, why=reason)
        return made if metrics is None else made | {"metrics": metrics}

    def whole(self, deltas: Sequence[OutputDelta], large: bool) -> dict[str, Any]:
        (delta,) = deltas
        items = self.new_items(no_event, partial(self.logprobs, large=large))
        for _ in chain(items.add(delta), items.end(status_of(delta))):
            pass
        made = self.ended(delta, items.done)
        if not large:  # its lists are encoded while they are sent
            self.keep(made)
        return made

    def keep(self, made: dict[str, Any]) -> None:
        """Store the response, which has ended."""
        store = self.context.state.responses
        if self.kept is not None and store is not None:
            if self.kept.task is None:
                with suppress(ApiError):  # a background response has its id
                    store.add(self.kept)
            store.end(self.kept, msgspec.json.encode(made), made["output"])

    def event(self, kind: str, **fields: Any) -> bytes:
        number, self.number = self.number, self.number + 1
        return event({"type": f"response.{kind}", "sequence_number": number, **fields})

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        if not self.number:
            yield from self.start()
        yield from self.items.add(delta)
        if delta.finish_reason is not None:
            yield from self.items.end(status_of(delta))
            whole = self.ended(delta, self.items.done)
            yield self.event(whole["status"], response=whole)
            self.keep(whole)

    def start(self) -> Iterator[bytes]:
        start = self.object("in_progress", [])
        yield self.event("created", response=start)
        yield self.event("in_progress", response=start)

    def end(self) -> Iterator[bytes]:
        return iter(())

    def running_object(self) -> bytes:
        """The object, encoded, of a response that still runs."""
        status = "in_progress" if self.number else "queued"
        return msgspec.json.encode(self.object(status, list(self.items.done)))

    def failed(self, error: BaseException) -> bytes:
        known = as_api_error(error)
        error_object = {"code": "server_error", "message": clean(known.message)}
        made = self.object("failed", [], error_object)
        if self.kept is not None and self.kept.task is not None:
            self.keep(made)
        return self.event("failed", response=made)


def no_event(kind: str, **fields: Any) -> bytes:
    """For an answer that is not streamed."""
    return b""


@route(ResponsesRequest, media="input")
async def responses(context: RequestContext, body: ResponsesRequest) -> ResponseAnswer | BackgroundAnswer:  # fmt: skip
    """Answer a conversation, in the Responses protocol."""
    refuse_unsupported(body)
    before = previous(context, body)
    if before is None or before.size <= SHORT_BODY or context.request.scope.get(SIZE, 0) > SHORT_BODY:  # fmt: skip
        return await answer_of(context, body, before)
    work = partial(run_alone, answer_of, context, body, before)
    return await context.state.texts.run_sized(before.size, work)


def previous(context: RequestContext, body: ResponsesRequest) -> StoredResponse | None:
    """The response that this request continues.

    Raises:
        ApiError: 404: there is none; 400: it cannot be continued.
    """
    if body.previous_response_id is None:
        return None
    store = context.state.responses
    if store is None:
        raise invalid(f"`previous_response_id`: {why_not_stored(context.state)}; send the whole conversation as `input`", "previous_response_id")  # fmt: skip
    record = store.get(owner_of(context.request), body.previous_response_id)
    if not record.ended:
        raise invalid("`previous_response_id`: this response has not ended", "previous_response_id")
    return record


async def answer_of(
    context: RequestContext, body: ResponsesRequest, before: StoredResponse | None
) -> ResponseAnswer | BackgroundAnswer:
    given = body.input
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if before is not None:
        items = body.input = [*before.items, *items]
    chat = as_chat(body)
    media = list(media_of(items))
    if before is not None and media:
        need_media(context.engine.front, "input", media[0].kind).check_number(media, "input")
    chat.stream |= body.background  # its events are stored as they come
    source = await generation_of(context, chat, "resp_")
    answer = ResponseAnswer(context, body, source)
    if not body.store or context.state.responses is None:
        if body.background:
            raise invalid(f"`background`: {why_not_stored(context.state)}", "background")
        return answer
    size = OVERHEAD + ITEM_OVERHEAD * len(items) + context.request.scope.get(SIZE, 0)
    size += sum(item.num_bytes for item in media) + (0 if before is None else before.size)
    answer.kept = StoredResponse(
        source.id, owner_of(context.request), answer.running_object, list(items), size=size
    )
    return BackgroundAnswer(answer, answer.kept) if body.background else answer


def media_of(items: Iterable[dict[str, Any]]) -> Iterator[ReadMedia]:
    """The pictures, videos and sounds of a conversation."""
    for item in items:
        content = item.get("content", item.get("output"))
        for part in content if isinstance(content, list) else ():
            if isinstance(part, MediaPart):
                yield part.item


def status_of(delta: OutputDelta) -> str:
    return "incomplete" if delta.finish_reason in INCOMPLETE else "completed"
