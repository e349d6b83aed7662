"""Result types: RequestOutput, one CompletionOutput for each of its n outputs, and request metrics.

Plain data. `error_of` returns the exception of a failed request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from quire.engine.client import ERRORS
from quire.errors import QuireError
from quire.frontend.logprobs import Positions
from quire.protocol.output import ErrorKind, FinishReason


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds since the Unix epoch, and its counts."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """Start of the first step that includes the request."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    finished_time: float | None = None
    engine: int = 0
    """The place of its engine among the client's engines."""
    resumed: bool = False
    """A process of the engine died, another went on with the request, and its bits may differ from an undisturbed run's
    (`--resume`)."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0 before the first token."""
        return max(self.first_token_ts - self.arrival_time, 0.0) if self.first_token_ts else 0.0

    @property
    def first_token_time(self) -> float | None:
        return self.first_token_ts or None

    @property
    def queued(self) -> float:
        """Seconds in the queue before the first step; 0 while unknown."""
        return max(self.scheduled_ts - self.queued_ts, 0.0) if self.scheduled_ts else 0.0

    @property
    def time_in_queue(self) -> float | None:
        return self.scheduled_ts - self.arrival_time if self.scheduled_ts else None


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Positions | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the output; None for the model's own end-of-text token."""
    lora_request: Any = None
    error: str | None = None
    """The reason, when finish_reason is "error"."""
    error_kind: ErrorKind = "internal"
    details: dict[str, Any] = field(default_factory=dict)
    """What features say of a finished output, by their names (`Feature.answer`)."""

    # Features that do not exist yet; programs written for vLLM read these fields.
    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    @property
    def spec_decode_metrics(self) -> dict[str, Any] | None:
        """The draft tokens of a finished output, with per_request_spec_decode_metrics."""
        return self.details.get("speculation")

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs: deltas, cumulative or final, by `SamplingParams.output_kind`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Positions | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    cached_tokens_by_source: dict[str, int] | None = None
    """Where `num_cached_tokens` came from: "device" (the KV cache), "host", "disk", "redis". Not in vLLM."""
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    prompt_token_id_logprobs: Any = None

    @property
    def parts(self) -> list[CompletionOutput]:
        """What `error_of` reads."""
        return self.outputs

    def add(self, newer: RequestOutput, aggregate: bool = True) -> None:
        """Merge a later output of the same request: append its deltas, or replace with `aggregate` False."""
        self.finished |= newer.finished
        self.metrics = newer.metrics
        if newer.prompt_logprobs is not None:
            self.prompt_logprobs = newer.prompt_logprobs
        by_index = {output.index: place for place, output in enumerate(self.outputs)}
        for output in newer.outputs:
            place = by_index.get(output.index)
            if place is None:
                self.outputs.append(output)
            elif aggregate:
                _join(self.outputs[place], output)
            else:
                self.outputs[place] = output


def _join(old: CompletionOutput, new: CompletionOutput) -> None:
    old.text += new.text
    old.token_ids = old.token_ids + new.token_ids
    if new.logprobs is not None:
        joined = list(old.logprobs or ())
        joined.extend(new.logprobs)
        old.logprobs = joined
    old.cumulative_logprob = new.cumulative_logprob
    old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    old.error, old.error_kind = new.error, new.error_kind
    old.details = new.details


def by_source(num_cached_tokens: int | None, loaded: Mapping[str, int]) -> dict[str, int] | None:
    """Where cached tokens of a prompt came from. `loaded`: of those that were not in the KV cache. None: unknown yet."""
    if num_cached_tokens is None:
        return None
    found = {"device": num_cached_tokens - sum(loaded.values()), **loaded}
    return {source: count for source, count in found.items() if count}


class AnyOutput(Protocol):
    """The output of a request of either kind: generated tokens, or a tensor."""

    request_id: str
    prompt_token_ids: list[int]
    finished: bool
    metrics: RequestMetrics | None

    @property
    def num_cached_tokens(self) -> int | None: ...

    @property
    def parts(self) -> Sequence[Any]: ...


def error_of(output: AnyOutput) -> QuireError | None:
    """The exception of a failed request; None if it has not failed."""
    for one in output.parts:
        if one.finish_reason == "error":
            return ERRORS[one.error_kind](f"request {output.request_id}: {one.error or 'failed'}")
    return None


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search; `tokens` begins with the prompt's tokens."""

    tokens: list[int]
    logprobs: list[Any] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    score: float = 0.0
    """cum_logprob normalized by length; the search ranks sequences by it."""


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences found, best first."""

    sequences: list[BeamSearchSequence]
