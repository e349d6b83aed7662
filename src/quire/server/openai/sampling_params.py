"""Request fields -> SamplingParams, within the server's limits.

Knows which values are refused, and why. `frontend` checks what depends on the model (lengths, vocabulary).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire import env
from quire.config.unsupported import REQUEST_FIELDS
from quire.frontend.generation_config import GenerationDefaults
from quire.protocol.sampling_params import BeamSearchParams, SamplingParams
from quire.server.errors import ApiError, invalid
from quire.server.middleware import VALID_ID
from quire.server.openai.response_format import constraint
from quire.server.schemas import ChatRequest, CompletionRequest, Sampling

MAX_SALT = 128  # characters
MAX_STOP = 1024  # characters: a stop string costs a table of its length, and delays the output by its length
MAX_BAD_WORD = 256  # characters: each is tokenized twice
LISTS = {
    "stop_token_ids": "MAX_LIST_ENTRIES",
    "bad_words": "MAX_LIST_ENTRIES",
    "logprob_token_ids": "MAX_LIST_ENTRIES",
    "logit_bias": "MAX_LOGIT_BIASES",
}
"""Field -> environment variable with its greatest length. allowed_token_ids may be as long as the vocabulary."""
DELTA, FINAL_ONLY = 1, 2
DRAWING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip

NOT_WITH_BEAM_SEARCH = (
    "stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "min_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "prompt_logprobs", "logprob_token_ids", "repetition_detection",
    "thinking_token_budget", "echo", "best_of", "tools",
)  # fmt: skip
"""Fields that would change the search. Sampling fields (top_p, seed) are accepted and ignored: nothing is sampled."""


def refuse_unsupported(request: Sampling) -> None:
    """Raises ApiError 400 for a field whose feature is missing: an answer that ignores it would be wrong."""
    for name, feature in REQUEST_FIELDS.items():
        if (given := getattr(request, name, None)) is not None and given is not False:
            raise invalid(f"`{name}`: {feature} is not supported yet; leave the field out", name)


def check(request: Sampling) -> None:
    """Check the limits of everything that a client can make long.

    Raises:
        ApiError: 400 that names the field.
    """
    refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise invalid("`stream_options` needs `stream: true`", "stream_options")
    # reading the environment costs as much as all other checks
    max_n = 1 if request.n == 1 else env.get("MAX_N_SEQUENCES")
    if not 1 <= request.n <= max_n:
        raise invalid(f"`n` is {request.n}; it must be from 1 to {max_n}", "n")
    stops = 1 if isinstance(request.stop, str) else len(request.stop or [])
    if stops > 1 and stops > (max_stops := env.get("MAX_STOP_STRINGS")):
        raise invalid(f"`stop` has {stops} strings; the limit is {max_stops}", "stop")
    check_texts("stop", [request.stop] if isinstance(request.stop, str) else request.stop, MAX_STOP)
    for name, limit in LISTS.items():
        if (given := getattr(request, name)) and len(given) > (max_entries := env.get(limit)):
            raise invalid(f"`{name}` is too long; the limit is {max_entries} entries", name)
    check_texts("bad_words", request.bad_words, MAX_BAD_WORD)
    if request.stream and request.prompt_logprobs:
        raise invalid("`prompt_logprobs` is not available with `stream: true`", "prompt_logprobs")
    if request.stream_interval is not None and request.stream_interval < 1:
        raise invalid("`stream_interval` must be at least 1", "stream_interval")
    if request.truncate_prompt_tokens is not None and request.truncate_prompt_tokens < -1:
        raise invalid("`truncate_prompt_tokens` must be at least -1", "truncate_prompt_tokens")
    if request.truncation_side not in (None, "left", "right"):
        raise invalid("`truncation_side` must be 'left' or 'right'", "truncation_side")
    if request.timeout is not None and not request.timeout > 0:
        raise invalid("`timeout` must be a number of seconds above 0", "timeout")
    if request.request_id is not None and not VALID_ID.fullmatch(request.request_id):
        raise invalid("`request_id` must have 1 to 256 visible ASCII characters", "request_id")
    salt = request.cache_salt
    if salt is not None and (not 1 <= len(salt) <= MAX_SALT or set(salt) & set("@/\\\0")):
        raise invalid(
            f"`cache_salt` must have 1 to {MAX_SALT} characters, none of them @ / \\ or NUL",
            "cache_salt",
        )


def check_texts(name: str, texts: Sequence[str] | None, most: int) -> None:
    """Raises ApiError 400: a text is too long."""
    for text in texts or ():
        if len(text) > most:
            raise invalid(
                f"`{name}` has a string of {len(text)} characters; the limit is {most}: shorten it",
                name,
            )


def token_biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError as error:
        raise invalid("the keys of `logit_bias` must be token ids", "logit_bias") from error


def shared(request: Sampling, defaults: GenerationDefaults) -> dict[str, Any]:
    """Keywords of SamplingParams: from the request, else from the model's defaults, else left out."""
    keywords: dict[str, Any] = {}
    for name in () if request.use_beam_search else DRAWING:
        value = getattr(request, name)
        if value is None:
            value = defaults.sampling.get(name)
        if value is not None:
            keywords[name] = value
    stop = [request.stop] if isinstance(request.stop, str) else list(request.stop or [])
    return keywords | {
        "n": request.n,
        "best_of": best_of(request),
        "seed": request.seed,
        "stop": stop,
        "stop_token_ids": list(request.stop_token_ids),
        "bad_words": list(request.bad_words),
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "ignore_eos": request.ignore_eos,
        "min_tokens": request.min_tokens,
        "prompt_logprobs": request.prompt_logprobs,
        "thinking_token_budget": request.thinking_token_budget,
        "logprob_token_ids": request.logprob_token_ids,
        "skip_special_tokens": request.skip_special_tokens,
        "spaces_between_special_tokens": request.spaces_between_special_tokens,
        "logit_bias": token_biases(request.logit_bias),
        "allowed_token_ids": without_repeats(request.allowed_token_ids),
        "extra_args": request.vllm_xargs,
        "structured_outputs": constraint(request),
        "repetition_detection": request.repetition_detection,
        "speculative": request.speculative,
        "output_kind": DELTA if request.stream else FINAL_ONLY,
    }


def best_of(request: Sampling) -> int | None:
    """The number of answers of which the n most likely are sent."""
    if request.best_of is not None and request.best_of < request.n:
        raise invalid(
            f"`best_of` is {request.best_of}; it must be at least n = {request.n}", "best_of"
        )
    if request.stream and (request.best_of or 0) > request.n:
        raise invalid("`best_of` above `n` is not available with `stream: true`", "best_of")
    return request.best_of


def without_repeats(ids: list[int] | None) -> list[int] | None:
    return None if ids is None else list(dict.fromkeys(ids))


def completion_params(request: CompletionRequest, defaults: GenerationDefaults) -> SamplingParams:
    check(request)
    if request.logprobs is not None and request.logprobs < -1:
        raise invalid("`logprobs` must be at least 0, or -1 for all", "logprobs")
    if request.max_tokens < (0 if request.echo else 1):
        raise invalid(
            f"`max_tokens` is {request.max_tokens}; it must be at least 1 (0 only with `echo`)",
            "max_tokens",
        )
    keywords = shared(request, defaults)
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        keywords["prompt_logprobs"] = request.logprobs
    return SamplingParams(
        **keywords,
        logprobs=request.logprobs,
        max_tokens=defaults.max_tokens(max(1, request.max_tokens)),
    )


def chat_params(request: ChatRequest, defaults: GenerationDefaults) -> SamplingParams:
    check(request)
    top = request.top_logprobs
    if top is not None and top != 0 and not request.logprobs:
        raise invalid("`top_logprobs` needs `logprobs: true`", "top_logprobs")
    if top is not None and top < -1:
        raise invalid("`top_logprobs` must be at least 0, or -1 for all", "top_logprobs")
    if request.logprob_token_ids is not None and not request.logprobs:
        raise invalid("`logprob_token_ids` needs `logprobs: true`", "logprob_token_ids")
    asked = request.max_completion_tokens
    name = "max_tokens" if asked is None else "max_completion_tokens"
    asked = request.max_tokens if asked is None else asked
    if asked is not None and asked < 1:
        raise ApiError(400, f"`{name}` is {asked}; it must be at least 1", param=name)
    return SamplingParams(
        **shared(request, defaults),
        logprobs=(top or 0) if request.logprobs else None,
        max_tokens=defaults.max_tokens(asked),
    )


def beam_search_params(
    request: Sampling, params: SamplingParams, defaults: GenerationDefaults
) -> BeamSearchParams | None:
    """None: the request uses no beam search.

    Raises:
        ApiError: 400 that names a field that beam search does not support.
    """
    if not request.use_beam_search:
        return None
    for name in NOT_WITH_BEAM_SEARCH:
        if getattr(request, name, None):
            raise invalid(
                f"`{name}` is not supported with `use_beam_search`; leave one of them out", name
            )
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens or 1 << 30,
        ignore_eos=params.ignore_eos,
        temperature=float(defaults.sampling.get("temperature", 1.0))
        if request.temperature is None
        else request.temperature,
        length_penalty=request.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        structured_outputs=params.structured_outputs,
        skip_special_tokens=params.skip_special_tokens,
    )
