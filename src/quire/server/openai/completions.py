"""POST /v1/completions: continues a text.

Knows this endpoint's request and answer shapes. Turns a request into a `Generation`, and its deltas into choices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quire.frontend.prompt_embeddings import check_has_tokens
from quire.frontend.prompts import Prompt
from quire.server.endpoint import RequestContext, route
from quire.server.errors import invalid
from quire.server.generation import Generation
from quire.server.limits import completions_of, take_from_key
from quire.server.openai import logprobs as shapes
from quire.server.openai.chunks import MARK, ChunkAnswer, interval
from quire.server.openai.sampling_params import beam_search_params, completion_params
from quire.server.output_delta import OutputDelta
from quire.server.prompts import given_prompts, one_prompt
from quire.server.schemas import CompletionRequest


class CompletionAnswer(ChunkAnswer):
    """Tracks the text offset of each completion."""

    kind = chunk_kind = "text_completion"

    def __init__(self, context: RequestContext, body: CompletionRequest, source: Generation):
        super().__init__(context, body, source)
        self.offsets: dict[int, int] = {}
        self.echoed: set[int] = set()

    def prompt_of(self, delta: OutputDelta) -> Prompt:
        return self.source.prompts[delta.prompt]

    def text_of(self, prompt: Prompt) -> str:
        """The prompt's text; decoded if the client sent token ids."""
        if prompt.text is None:
            prompt.text = self.context.engine.decode(prompt.tokens)
        return prompt.text

    @property
    def is_text(self) -> bool:
        """Whether the chunks of a choice have nothing but new text between its first and its last."""
        body = self.body
        return body.logprobs is None and not body.return_token_ids and body.max_tokens != 0

    def choice(
        self, delta: OutputDelta, large: bool = False, *, whole: bool = True
    ) -> dict[str, Any]:
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
                before = self.source.counts[delta.prompt].prompt_logprobs or []
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
            prompt_logprobs = self.source.counts[delta.prompt].prompt_logprobs
            wanted = self.body.prompt_logprobs is not None
            choice["prompt_logprobs"] = shapes.prompt(prompt_logprobs, large) if wanted else None
        if whole or first:
            choice["prompt_token_ids"] = prompt.tokens if ids else None
            if self.body.return_prompt_text:
                choice["prompt_text"] = self.text_of(prompt)
        return choice

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self.body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def whole(self, deltas: Sequence[OutputDelta], large: bool) -> dict[str, Any]:
        metrics = self.source.metrics
        last = {} if metrics is None else {"metrics": metrics}
        return super().whole(deltas, large) | {"kv_transfer_params": None} | last

    def frames(self, delta: OutputDelta) -> Iterator[bytes]:
        choice = self.choice(delta, whole=False)
        ended = delta.finish_reason is not None
        if not (choice["text"] or ended or choice["logprobs"] or choice["token_ids"]):
            return  # an incomplete character, or a possible stop string
        if self.is_text and not self.running_usage:
            only_text = OutputDelta(0, delta.index, MARK, [], None, None, None)
            self.only_text_follows(self.choice(only_text, whole=False))
        usage = self.usage() if self.running_usage else None
        yield self.frame([choice], usage, ended and not self.final_usage)


@route(CompletionRequest)
async def completions(context: RequestContext, body: CompletionRequest) -> CompletionAnswer:
    """Continue one text or several."""
    state, engine = context.state, context.engine
    if body.use_beam_search and body.stream:
        raise invalid(
            "`stream` is not supported with `use_beam_search`; leave one of them out", "stream"
        )
    params = completion_params(body, engine.inputs.defaults)
    given = given_prompts(body)
    take_from_key(context.request, completions_of(len(given), params, state))
    prompts = []
    for prompt in given:
        prompts.append(await one_prompt(prompt, body, engine))
        if not state.texts.inside:
            await asyncio.sleep(0)  # let other tasks of the loop run
    if body.echo or body.return_prompt_text:
        for prompt in prompts:
            check_has_tokens(prompt.media, "echo" if body.echo else "return_prompt_text")
    of_prompt = body.echo or body.return_token_ids or body.return_prompt_text
    repeated = bool(of_prompt) or body.prompt_logprobs is not None
    generation = Generation(
        context, context.new_id("cmpl-", body), body, prompts, params, None,
        beam_search_params(body, params, engine.inputs.defaults), interval(body, state), params.n if repeated else 1,
    )  # fmt: skip
    return CompletionAnswer(context, body, generation)
