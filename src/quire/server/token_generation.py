"""POST /inference/v1/generate: continues token ids with token ids, without a text.

Knows this endpoint's request and answer shapes. Its sampling parameters are a completion request's, which
checks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.frontend.logprobs import Logprob
from quire.protocol.sampling_params import SamplingParams
from quire.server.answer import GenerationAnswer
from quire.server.endpoint import RequestContext, route
from quire.server.errors import invalid
from quire.server.generation import Generation
from quire.server.json_body_parser import not_valid
from quire.server.limits import completions_of, take_from_key
from quire.server.openai import logprobs as shapes
from quire.server.openai.sampling_params import DRAWING, completion_params
from quire.server.output_delta import OutputDelta
from quire.server.prompts import one_prompt
from quire.server.schemas import CompletionRequest, GenerateRequest, Sampling
from quire.server.sse import DONE, data
from quire.server.streaming_json import listed

RENAMED = {"extra_args": "vllm_xargs"}
NOT_TAKEN = {"use_beam_search", "length_penalty", "stream_interval"}
TAKEN = {*Sampling.__struct_fields__} & {*SamplingParams.__struct_fields__} - NOT_TAKEN
TAKEN |= {"max_tokens", "logprobs", "extra_args"}
"""Sampling parameters that the endpoint takes."""
WITHOUT_EFFECT = {"detokenize", "output_kind", "skip_clone", "flat_logprobs"}
"""The form of the answer does not depend on them: `output_mode` and `stream` choose it."""
REFUSED = {
    "features": "media input is not supported",
    "content_parts": "media input is not supported",
    "kv_transfer_params": "KV transfer is not supported",
    "ec_transfer_params": "encoder-cache transfer is not supported",
}


def as_completion(body: GenerateRequest) -> CompletionRequest:
    """The completion request with the same parameters; those that are not given have no default of the model.

    Raises:
        ApiError: 400 that names the field.
    """
    for name, why in REFUSED.items():
        if getattr(body, name) is not None:
            raise invalid(f"`{name}`: {why}; leave it out", name)
    if body.output_mode not in ("tokens", "text"):
        raise invalid("`output_mode` must be 'tokens' or 'text'", "output_mode")
    if not body.token_ids:
        raise invalid("`token_ids` is empty", "token_ids")
    given = {name: value for name, value in body.sampling_params.items() if value is not None}
    if unknown := given.keys() - TAKEN - WITHOUT_EFFECT:
        name = min(unknown)[:64]
        raise invalid(f"`sampling_params.{name}` is not a sampling parameter of this endpoint; leave it out", "sampling_params")  # fmt: skip
    if body.reasoning_ended is False and "structured_outputs" in given:
        raise invalid("`reasoning_ended` must be true with `structured_outputs`: the output is constrained from its first token", "reasoning_ended")  # fmt: skip
    fields: dict[str, Any] = {name: getattr(NEUTRAL, name) for name in DRAWING}
    fields |= {RENAMED.get(name, name): given[name] for name in given.keys() & TAKEN}
    copied = ("model", "request_id", "stream", "stream_options", "cache_salt", "priority")
    fields |= {name: getattr(body, name) for name in copied}
    fields |= {"max_tokens": given.get("max_tokens", 1), "add_special_tokens": False}
    try:
        return msgspec.convert(
            {name: value for name, value in fields.items() if value is not None},
            CompletionRequest,
            strict=False,
        )
    except msgspec.ValidationError as error:
        raise not_valid(str(error)) from error


NEUTRAL = SamplingParams()


# -- out ------------------------------------------------------------------------------------------
def token_entry(token: int, entry: Logprob) -> dict[str, Any]:
    return {
        "token_id": token,
        "logprob": shapes.floored(entry.logprob),
        "rank": entry.rank or None,
    }


def token_rows(
    tokens: Sequence[int], positions: Iterable[Mapping[int, Logprob] | None], top: int | None
) -> Iterator[dict[str, Any]]:
    """One row a token; its candidates begin with the token itself. `top` None: all."""
    for token, position in zip(tokens, positions, strict=False):
        if position is None:
            continue
        shown = list(position.items())[:top]
        row = token_entry(token, shapes.chosen(position, token))
        yield row | {"top_logprobs": [token_entry(one, entry) for one, entry in shown]}


class TokenAnswer(GenerationAnswer):
    """The choices of whole answers and of chunks."""

    started = False

    def logprobs(self, delta: OutputDelta, large: bool) -> dict[str, Any] | None:
        params = self.source.params
        if delta.logprobs is None or (params.logprobs is None and params.logprob_token_ids is None):
            return None
        every = params.logprobs == -1 or params.logprob_token_ids is not None
        if self.body.output_mode == "text":
            top = -1 if every else params.logprobs or 0
            return shapes.chat(delta.tokens, delta.logprobs, top, self.name, large)
        max_entries = None if every else max(params.logprobs or 0, 1)
        rows = partial(token_rows, delta.tokens, delta.logprobs, max_entries)
        return {"content": listed(rows, large)}

    def choice(self, delta: OutputDelta, large: bool = False) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            "logprobs": self.logprobs(delta, large),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.tokens,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
        }
        return choice | {"text": delta.text} if self.body.output_mode == "text" else choice

    def head(self) -> dict[str, Any]:
        return {"request_id": self.source.id, "output_mode": self.body.output_mode}

    def prompt_fields(self) -> dict[str, Any]:
        ids = self.source.prompts[0].tokens
        return (
            {"prompt_token_ids": ids, "mm_placeholders": {}} if self.body.return_token_ids else {}
        )

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        if not (delta.tokens or delta.finish_reason or (self.body.output_mode == "text" and delta.text)):  # fmt: skip
            return
        options = self.body.stream_options
        running = options is not None and options.include_usage and options.continuous_usage_stats
        chunk = self.head() | {"choices": [self.choice(delta)]}
        chunk["usage"] = self.usage() if running else None
        if not self.started:
            self.started = True
            chunk |= self.prompt_fields()
        yield data(chunk)

    def end(self) -> Iterator[bytes]:
        options = self.body.stream_options
        if options is not None and options.include_usage:
            present = {name: value for name, value in self.usage().items() if value is not None}
            yield data(self.head() | {"choices": [], "usage": present})
        yield DONE

    def whole(self, deltas: Sequence[OutputDelta], large: bool) -> dict[str, Any]:
        return self.head() | {
            "model": self.context.model,
            "created": self.source.created,
            "choices": listed(partial(map, partial(self.choice, large=large), deltas), large),
            "usage": self.usage(),
            "prompt_logprobs": shapes.prompt(self.source.counts[0].prompt_logprobs, large),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": self.source.metrics,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            **self.prompt_fields(),
        }


@route(GenerateRequest)
async def generate(context: RequestContext, body: GenerateRequest) -> TokenAnswer:
    """Continue token ids with token ids."""
    engine, asked = context.engine, as_completion(body)
    defaults = engine.inputs.defaults
    params = completion_params(asked, defaults)
    given = body.sampling_params.get("max_tokens") is not None
    params = params.settled(
        max_tokens=params.max_tokens if given else defaults.max_tokens(None),
        detokenize=body.output_mode == "text" or bool(params.stop),
    )
    take_from_key(context.request, completions_of(1, params, context.state))
    if asked.truncate_prompt_tokens is None:
        engine.inputs.check_length(len(body.token_ids))
    if not all(
        type(token) is int for token in body.token_ids
    ):  # only short bodies are checked before
        raise invalid("`token_ids` must be a list of token ids", "token_ids")
    prompt = await one_prompt(body.token_ids, asked, engine)
    request_id = context.new_id("generate-tokens-", body)
    return TokenAnswer(context, body, Generation(context, request_id, asked, [prompt], params))
