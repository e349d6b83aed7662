"""What a user gets back: RequestOutput, one CompletionOutput for each of its n outputs, times.

Plain data. `error_of` tells whether a request failed, and as which exception.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from quire.errors import QueueFull, QuireError, ValidationError
from quire.frontend.logprobs import Positions
from quire.protocol.output import ErrorKind, FinishReason


@dataclass(slots=True)
class RequestMetrics:
    """When what happened; seconds since the epoch."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """The first step that worked on it."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    finished_time: float | None = None

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0 before there is one."""
        return max(self.first_token_ts - self.arrival_time, 0.0) if self.first_token_ts else 0.0

    @property
    def first_token_time(self) -> float | None:
        return self.first_token_ts or None

    @property
    def queued(self) -> float:
        """Seconds it waited before its first step, as far as is known."""
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
    """The stop string, or the id of the stop token, that ended it; None for the model's own end of text."""
    lora_request: Any = None
    error: str | None = None
    """Why, when finish_reason is "error"."""
    error_kind: ErrorKind = "internal"

    # of features that come later: programs ask for them
    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs so far (what that means, `SamplingParams.output_kind` says)."""

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
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    prompt_token_id_logprobs: Any = None

    def add(self, newer: RequestOutput, aggregate: bool = True) -> None:
        """Merge a later output of the same request in: deltas are joined, with `aggregate` False replaced."""
        self.finished |= newer.finished
        self.metrics = newer.metrics
        if newer.prompt_logprobs is not None:
            self.prompt_logprobs = newer.prompt_logprobs
        by_index = {output.index: at for at, output in enumerate(self.outputs)}
        for output in newer.outputs:
            at = by_index.get(output.index)
            if at is None:
                self.outputs.append(output)
            elif aggregate:
                _join(self.outputs[at], output)
            else:
                self.outputs[at] = output


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


ERRORS: dict[ErrorKind, type[QuireError]] = {
    "invalid": ValidationError,
    "overloaded": QueueFull,
    "internal": QuireError,
}


def error_of(output: RequestOutput) -> QuireError | None:
    """The exception that a failed request stands for; None for one that has not failed."""
    for one in output.outputs:
        if one.finish_reason == "error":
            return ERRORS[one.error_kind](f"request {output.request_id}: {one.error or 'failed'}")
    return None


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search; `tokens` begin with the prompt's."""

    tokens: list[int]
    logprobs: list[Any] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    score: float = 0.0
    """cum_logprob, normalised by length: what they are ordered by."""


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences that were found, best first."""

    sequences: list[BeamSearchSequence]
