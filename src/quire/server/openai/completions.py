"""POST /v1/completions: continues a text.

Knows this endpoint's request and answer shapes. Turns a request into a `Generation`, and its deltas into choices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.async_engine import AsyncEngine
from quire.frontend.prompt_embeddings import check_has_tokens
from quire.frontend.prompts import Prompt
from quire.protocol.sampling_params import SamplingParams
from quire.server.adapters import model_of
from quire.server.errors import invalid
from quire.server.generation import Generation
from quire.server.limits import completions_of, take_from_key
from quire.server.middleware import TENANT
from quire.server.openai import logprobs as shapes
from quire.server.openai.chunks import (
    ChunkEncoder,
    ChunkFrames,
    data_parallel_rank,
    interval,
    load_report,
    new_id,
    priority,
)
from quire.server.openai.sampling_params import beam_search_params, completion_params
from quire.server.output_delta import OutputDelta
from quire.server.prompts import given_prompts, one_prompt
from quire.server.request_body import prepared, read
from quire.server.schemas import CompletionRequest
from quire.server.sse import DONE, EventStream, event_stream, until_disconnect
from quire.server.state import ServerState, state_of
from quire.server.streaming_json import json_answer, listed


@dataclass(slots=True)
class CompletionChoiceBuilder:
    """Builds choices from deltas; tracks the text offset of each completion."""

    body: CompletionRequest
    engine: AsyncEngine
    generation: Generation
    name: shapes.Name
    offsets: dict[int, int] = field(default_factory=dict)
    echoed: set[int] = field(default_factory=set)

    def prompt_of(self, delta: OutputDelta) -> Prompt:
        return self.generation.prompts[delta.prompt]

    def text_of(self, prompt: Prompt) -> str:
        """The prompt's text; decoded if the client sent token ids."""
        if prompt.text is None:
            prompt.text = self.engine.decode(prompt.tokens)
        return prompt.text

    @property
    def is_text(self) -> bool:
        """Whether the chunks of a choice have nothing but new text between its first and its last."""
        body = self.body
        return body.logprobs is None and not body.return_token_ids and body.max_tokens != 0

    def later(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk with nothing but new text."""
        return self.choice(OutputDelta(0, index, text, [], None, None, None), whole=False)

    def choice(self, delta: OutputDelta, whole: bool, large: bool = False) -> dict[str, Any]:
        """`whole`: a complete answer, not a chunk. `large`: its lists are encoded while they are sent."""
        first = delta.index not in self.echoed
        self.echoed.add(delta.index)
        text, tokens = delta.text, delta.tokens
        positions: Iterable[shapes.Position] = delta.logprobs or []
        finish, stop = delta.finish_reason, delta.stop_reason
        if self.body.max_tokens == 0:  # drop the token: the engine draws at least one
            text, tokens, positions, finish, stop = "", [], [], "length", None
        shown = tokens
        prompt = self.prompt_of(delta)
        if self.body.echo and first:
            text = self.text_of(prompt) + text
            if self.body.logprobs is not None:
                before = self.generation.counts[delta.prompt].prompt_logprobs or []
                shown, positions = prompt.tokens + tokens, shapes.Joined((before, positions))
        choice: dict[str, Any] = {"index": delta.index, "text": text, "logprobs": None}
        if self.body.logprobs is not None and shown and large:
            choice["logprobs"] = shapes.long_legacy(shown, positions, self.body.logprobs, self.name)
        elif self.body.logprobs is not None and shown:
            offset = self.offsets.get(delta.index, 0)
            choice["logprobs"], self.offsets[delta.index] = shapes.legacy(
                shown, positions, self.body.logprobs, self.name, offset
            )
        ids = self.body.return_token_ids
        choice |= {
            "finish_reason": finish,
            "stop_reason": stop,
            "token_ids": tokens if ids else None,
        }
        if whole:
            prompt_logprobs = self.generation.counts[delta.prompt].prompt_logprobs
            wanted = self.body.prompt_logprobs is not None
            choice["prompt_logprobs"] = shapes.prompt(prompt_logprobs, large) if wanted else None
        if whole or first:
            choice["prompt_token_ids"] = prompt.tokens if ids else None
            if self.body.return_prompt_text:
                choice["prompt_text"] = self.text_of(prompt)
        return choice

    def usage(self, details: bool) -> dict[str, Any]:
        usage = self.generation.usage(details)
        if self.body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


class CompletionChunkEncoder(ChunkEncoder):
    """Encodes deltas as frames."""

    def __init__(self, builder: CompletionChoiceBuilder, frames: ChunkFrames, details: bool):
        super().__init__(frames, details)
        self.builder = builder

    def whole(self, delta: OutputDelta) -> Iterator[bytes]:
        builder, frames = self.builder, self.frames
        choice = builder.choice(delta, whole=False)
        ended = delta.finish_reason is not None
        if not (choice["text"] or ended or choice["logprobs"] or choice["token_ids"]):
            return  # an incomplete character, or a possible stop string
        if builder.is_text and not frames.running_usage:
            self.around[delta.index] = frames.around(partial(builder.later, delta.index))
        usage = builder.usage(self.details) if frames.running_usage else None
        last = ended and not frames.final_usage
        yield frames.frame([choice], usage, last, builder.generation.metrics)

    def end(self) -> Iterator[bytes]:
        if self.frames.final_usage:
            metrics = self.builder.generation.metrics
            yield self.frames.frame([], self.builder.usage(self.details), True, metrics)
        yield DONE


async def read_request(
    request: Request, body: CompletionRequest, engine: AsyncEngine, state: ServerState
) -> tuple[SamplingParams, list[Prompt]]:
    """Check and tokenize a request. Raises ApiError, ValidationError: it is invalid."""
    params = completion_params(body, engine.inputs.defaults)
    given = given_prompts(body)
    total = completions_of(len(given), params, state)
    take_from_key(request, total)
    prompts = []
    for prompt in given:
        prompts.append(await one_prompt(prompt, body, engine))
        if not state.texts.inside:
            await asyncio.sleep(0)  # let other tasks of the loop run
    if body.echo or body.return_prompt_text:
        for prompt in prompts:
            check_has_tokens(prompt.media, "echo" if body.echo else "return_prompt_text")
    return params, prompts


async def completions(request: Request) -> Response | EventStream:
    """Continue one text or several."""
    state = state_of(request)
    engine = state.serving()
    body = await read(request, CompletionRequest)
    model, adapter = await model_of(request, body.model)
    if body.use_beam_search and body.stream:
        raise invalid(
            "`stream` is not supported with `use_beam_search`; leave one of them out", "stream"
        )
    params, prompts = await prepared(request, read_request, request, body, engine, state)
    of_prompt = body.echo or body.return_token_ids or body.return_prompt_text
    repeated = bool(of_prompt) or body.prompt_logprobs is not None
    generation = Generation(
        state, engine, new_id("cmpl-", request, body), prompts, params,
        priority(request, body), body.timeout, interval(body, state),
        request.scope.get(TENANT), beams=beam_search_params(body, params, engine.inputs.defaults),
        copies=params.n if repeated else 1,
    )  # fmt: skip
    generation.adapter = adapter
    generation.data_parallel_rank = data_parallel_rank(request)
    as_ids = body.return_tokens_as_token_ids
    as_ids = state.config.server.return_tokens_as_token_ids if as_ids is None else as_ids
    builder = CompletionChoiceBuilder(
        body, engine, generation, shapes.naming(as_ids, engine.token_text)
    )
    details = state.config.server.enable_prompt_tokens_details
    if body.stream:
        frames = ChunkFrames(
            "text_completion", generation.id, model, state.fingerprint, body, state
        )
        return await event_stream(
            request, generation, CompletionChunkEncoder(builder, frames, details)
        )
    created = int(time.time())
    deltas = await until_disconnect(request.receive, generation.whole())
    large = generation.is_large(deltas)
    choices = partial(map, partial(builder.choice, whole=True, large=large), deltas)
    return json_answer(
        {
            "id": generation.id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": listed(choices, large),
            "service_tier": None,
            "system_fingerprint": state.fingerprint,
            "usage": builder.usage(details),
            "kv_transfer_params": None,
            **({} if generation.metrics is None else {"metrics": generation.metrics}),
        },
        large,
        state.answering,
        headers=load_report(request, state),
    )
