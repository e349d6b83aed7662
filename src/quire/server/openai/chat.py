"""POST /v1/chat/completions: answers a conversation.

Knows this endpoint's request and answer shapes. Turns a request into a `Generation`, and its deltas into messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quire.frontend.chat import ChatOptions
from quire.frontend.input_processor import TokenizeOptions
from quire.frontend.media.placeholders import media_in, new_mark
from quire.frontend.media.prompt_reader import media_inputs, need_media
from quire.frontend.parsers.call_writer import CallDelta
from quire.frontend.prompts import Prompt
from quire.server.endpoint import RequestContext, route
from quire.server.errors import invalid
from quire.server.generation import Generation
from quire.server.limits import completions_of, take_from_key
from quire.server.openai import logprobs as shapes
from quire.server.openai.chat_output import output_reader
from quire.server.openai.chunks import MARK, ChunkAnswer, interval
from quire.server.openai.sampling_params import beam_search_params, chat_params
from quire.server.openai.tools import tool_choice_of, with_calls_read
from quire.server.output_delta import OutputDelta
from quire.server.pooling.schemas import InputBody
from quire.server.prompts import check_messages, media_prompt, render, tokenize_options
from quire.server.schemas import ChatRequest, TokenizeRequest
from quire.server.state import ServerState

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def effort_of(effort: Any, field: str) -> str | None:
    """Raises ApiError 400 that names the field."""
    if effort is None or effort in EFFORTS:
        return None if effort is None else str(effort)
    raise invalid(f"`{field}` must be one of {', '.join(EFFORTS)}; send other template variables in `chat_template_kwargs`", field)  # fmt: skip


def chat_options(
    body: ChatRequest | TokenizeRequest | InputBody, state: ServerState
) -> ChatOptions:
    """Raises ApiError 400: a client's chat template that the server does not trust, or options that exclude each other."""
    server = state.config.server
    if body.chat_template is not None and not server.trust_request_chat_template:
        raise invalid(
            "`chat_template` in a request needs a server started with --trust-request-chat-template;"
            " leave it out",
            "chat_template",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other; set one to false",
            "continue_final_message",
        )
    kwargs = dict(server.default_chat_template_kwargs)
    effort = effort_of(getattr(body, "reasoning_effort", None), "reasoning_effort")
    if effort is not None:
        thinks = effort != "none"
        kwargs |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    kwargs |= body.chat_template_kwargs
    return ChatOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template=body.chat_template,
        template_kwargs=kwargs,
        tools=body.tools,
        documents=getattr(body, "documents", None),
    )


async def chat_text(
    context: RequestContext, body: ChatRequest | TokenizeRequest | InputBody,
    messages: list[dict[str, Any]],
) -> str:  # fmt: skip
    """Render messages to text; every protocol uses this function."""
    check_messages(messages)
    options = chat_options(body, context.state)
    if (reader := media_inputs(context.engine.front)) is not None:
        options.media, options.media_in_place = reader.texts, reader.in_place
    return await render(with_calls_read(messages), options, context)


async def chat_prompt(context: RequestContext, body: ChatRequest, *, check: bool = True) -> Prompt:
    """The conversation as tokens. `check`: refuse it if it is too long for the model."""
    options = tokenize_options(body, body.add_special_tokens, fits_model=check)
    return await tokenized_chat(context, body, body.messages, options, body.cache_salt or "")


async def tokenized_chat(
    context: RequestContext, body: ChatRequest | TokenizeRequest | InputBody,
    messages: list[dict[str, Any]], options: TokenizeOptions, salt: str = "",
) -> Prompt:  # fmt: skip
    """The tokens and the text of a conversation, with its pictures. Raises: as `media_prompt` and `chat_text`."""
    if pictures := media_in(messages):
        mark = new_mark()
        placeholders = need_media(context.engine.front, "messages").placeholders
        text = await chat_text(context, body, placeholders.marked(messages, mark))
        return await media_prompt(context, options, text, mark, pictures, salt)
    text = await chat_text(context, body, messages)
    prompt = await context.engine.tokenize(Prompt(text, salt=salt), options)
    # all of it, also of truncated tokens: it shows whether the model is reasoning
    prompt.text = text
    return prompt


class ChatAnswer(ChunkAnswer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, context: RequestContext, body: ChatRequest, source: Generation):
        super().__init__(context, body, source)
        self.role = context.state.config.server.response_role
        self.started: set[int] = set()
        """Choices of which a chunk was sent."""

    @property
    def echo(self) -> str:
        """The last message's text, which the answer repeats if `echo` is set and the message has the answer's role."""
        last = self.body.messages[-1]
        content = last.get("content")
        if not self.body.echo or last["role"] != self.role or not content:
            return ""
        if isinstance(content, str):
            return content
        parts = [part if isinstance(part, str) else part.get("text", "") for part in content]
        return "".join(parts)

    def logprobs(self, delta: OutputDelta, large: bool = False) -> dict[str, Any] | None:
        if delta.logprobs is None or not self.body.logprobs:
            return None
        top = -1 if self.body.logprob_token_ids else self.body.top_logprobs or 0
        return shapes.chat(delta.tokens, delta.logprobs, top, self.name, large)

    def ids(self, delta: OutputDelta) -> list[int] | None:
        return delta.tokens if self.body.return_token_ids else None

    def choice(self, delta: OutputDelta, large: bool = False) -> dict[str, Any]:
        """`large`: its lists are encoded while they are sent."""
        text = self.echo + delta.text
        named = isinstance(self.body.tool_choice, dict)  # vLLM's content beside such a call is ""
        message: dict[str, Any] = {
            "role": self.role,
            "content": text or None if (delta.calls or delta.reasoning) and not named else text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **self.thoughts(delta.reasoning or None),
        }
        if delta.calls:
            message["tool_calls"] = [call_of(call) for call in delta.calls]
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self.logprobs(delta, large),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": self.ids(delta),
        }

    def thoughts(self, text: str | None) -> dict[str, Any]:
        """The reasoning, under one field name or both."""
        both = self.context.state.config.server.enable_reasoning_content
        return {"reasoning": text, "reasoning_content": text} if both else {"reasoning": text}

    def opening(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """The first chunks of a choice: its role, and the echo."""
        if delta.index in self.started:
            return []
        self.started.add(delta.index)
        chunks = [part(delta.index, {"role": self.role, "content": ""})]
        if self.echo:
            chunks.append(part(delta.index, {"content": self.echo}))
        return chunks

    def chunks(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """The chunks of a delta: reasoning, then content, then calls; none if nothing is visible."""
        logprobs, ids = self.logprobs(delta), self.ids(delta)
        parts: list[dict[str, Any]] = []
        if delta.reasoning:
            parts.append(self.thoughts(delta.reasoning))
        if delta.text:
            parts.append({"content": delta.text})
        if delta.calls:
            parts.append({"tool_calls": [call_delta(call) for call in delta.calls]})
        if not (parts or delta.finish_reason or logprobs or ids):
            return []
        chunks = [part(delta.index, new) for new in parts or [{}]]
        chunks[0] |= {"logprobs": logprobs, "token_ids": ids}
        chunks[-1]["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            chunks[-1]["stop_reason"] = delta.stop_reason
        return chunks

    def frames(self, delta: OutputDelta) -> Iterator[bytes]:
        body, prompt = self.body, self.source.prompts[0]
        usage = self.usage() if self.running_usage else None
        for index, opening in enumerate(self.opening(delta)):
            if index == 0 and body.return_token_ids:
                opening["prompt_token_ids"] = prompt.tokens
            if index == 0 and body.return_prompt_text:
                opening["prompt_text"] = prompt.text
            start = usage and usage | {
                "completion_tokens": 0,
                "total_tokens": usage["prompt_tokens"],
            }
            yield self.frame([opening], start)
        for chunk in self.chunks(delta):
            ended = chunk["finish_reason"] is not None
            yield self.frame([chunk], usage, ended and not self.final_usage)
        if not (body.logprobs or body.return_token_ids or self.running_usage):
            self.only_text_follows(part(delta.index, {"content": MARK}) | {"token_ids": None})

    def whole(self, deltas: Sequence[OutputDelta], large: bool) -> dict[str, Any]:
        body, source, prompt = self.body, self.source, self.source.prompts[0]
        logprobs = source.counts[0].prompt_logprobs
        whole = super().whole(deltas, large) | {
            "prompt_logprobs": None if body.prompt_logprobs is None else shapes.prompt(logprobs, large),
            "prompt_token_ids": prompt.tokens if body.return_token_ids else None,
            "kv_transfer_params": None,
        }  # fmt: skip
        if source.metrics is not None:
            whole["metrics"] = source.metrics
        if body.return_prompt_text:
            whole["prompt_text"] = prompt.text
        return whole


def call_of(call: CallDelta) -> dict[str, Any]:
    """A tool call with its id and name."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def call_delta(call: CallDelta) -> dict[str, Any]:
    """The first delta of a call has its id and name."""
    if call.id is not None:
        return {"index": call.index, **call_of(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


async def generation_of(context: RequestContext, body: ChatRequest, kind: str) -> Generation:
    """Check and render a chat request. `kind`: the prefix of the generation's id.

    Raises:
        ApiError, ValidationError: the request is invalid.
    """
    state, defaults = context.state, context.engine.inputs.defaults
    params = chat_params(body, defaults)
    choice = tool_choice_of(body)
    take_from_key(context.request, completions_of(1, params, state))
    prompt = await chat_prompt(context, body)
    params, reader = await output_reader(body, choice, params, prompt, context)
    return Generation(
        context, context.new_id(kind, body), body, [prompt], params, reader,
        beam_search_params(body, params, defaults), interval(body, state),
    )  # fmt: skip


@route(ChatRequest, media="messages")
async def chat(context: RequestContext, body: ChatRequest) -> ChatAnswer:
    """Answer a conversation."""
    return ChatAnswer(context, body, await generation_of(context, body, "chatcmpl-"))
