"""Output processor: turns one request's engine outputs into the RequestOutputs that its user reads.

    EngineOutput of a child -> `OutputProcessor.add` -> state of the child (tokens, text, log-probabilities)
                               `OutputProcessor.take` -> RequestOutput: deltas or everything, as requested

`take` builds the output, so a slow reader costs nothing. Knows one request. Does not know how outputs arrive or
which caller waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quire.frontend.detokenize import Detokenizer
from quire.frontend.input_processor import AcceptedRequest
from quire.frontend.logprobs import (
    FlatLogprobs,
    PackedLogprobs,
    Position,
    Positions,
    PromptLogprobs,
    positions,
)
from quire.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput, by_source
from quire.frontend.parallel_sampling import top_n
from quire.frontend.repetition_detector import RepetitionDetector
from quire.frontend.tokenizer import Tokenizer
from quire.protocol.output import EngineOutput, ErrorKind, FinishReason, Logprobs
from quire.protocol.sampling_params import RequestOutputKind, SamplingParams

Tap = Callable[[EngineOutput], None]
Answers = Mapping[str, Callable[[Sequence[Any]], Any]]
"""By feature: what makes one value of the details of all steps (`Feature.answer`)."""


@dataclass(slots=True)
class OutputState:
    """The state of one output of a request."""

    id: str
    index: int
    detokenizer: Detokenizer | None
    repetition: RepetitionDetector | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Position | None] | PackedLogprobs | None = None
    cumulative: float | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_kind: ErrorKind = "internal"
    details: dict[str, list[Any]] = field(default_factory=dict)
    """Feature name -> the details that the feature's gate added to each output (`EngineOutput.details`)."""
    delivered: int = 0
    """Number of tokens delivered to the user."""
    end_delivered: bool = False
    """The finish was delivered to the user."""

    def add(self, output: EngineOutput) -> None:
        """Add an engine output.

        Drops tokens after a stop string or a detected repetition; `finish` then overrides the engine's.
        """
        count, finish = len(output.tokens), None
        if self.detokenizer is not None or self.repetition is not None:
            count, finish = self._read(output)
        self.tokens += output.tokens[:count]
        for name, detail in output.details.items():
            self.details.setdefault(name, []).append(detail)
        if finish is not None:
            self.finish = finish
            if finish == "stop" and self.detokenizer is not None:
                self.stop_reason = self.detokenizer.stopped_by
        elif output.finish is not None:
            self.finish, self.stop_reason = output.finish, output.stopped_by
            self.error, self.error_kind = output.error, output.error_kind
        if output.logprobs is not None:
            chosen = output.logprobs.values[:count]
            self.cumulative = (self.cumulative or 0.0) + sum(values[0] for values in chosen)

    def _read(self, output: EngineOutput) -> tuple[int, FinishReason | None]:
        """How many tokens to keep, and the finish reason if a stop string or a repetition ends the output here."""
        detokenizer, repetition = self.detokenizer, self.repetition
        # A stop token is not part of the text.
        silent = output.finish == "stop" and (detokenizer is None or not detokenizer.include_stop)
        for index, token_id in enumerate(output.tokens[:-1] if silent else output.tokens, 1):
            if detokenizer is not None and detokenizer.add(token_id):
                return index, "stop"
            if repetition is not None and repetition.add(token_id):
                stopped = detokenizer is not None and detokenizer.end()
                return index, "stop" if stopped else "repetition"
        if output.finish is not None and detokenizer is not None and detokenizer.end():
            return len(output.tokens), "stop"
        return len(output.tokens), None

    @property
    def ended(self) -> bool:
        return self.finish is not None

    def is_ready(self, interval: int) -> bool:
        """There is something to deliver: a first token, `interval` more tokens, or the finish."""
        new = len(self.tokens) - self.delivered
        if self.finish is not None:
            return new > 0 or not self.end_delivered
        return new >= interval or (new > 0 and not self.delivered)


class OutputProcessor:
    """Collects the outputs of one request. Not thread-safe."""

    def __init__(
        self,
        accepted: AcceptedRequest,
        tokenizer: Tokenizer | None,
        packs: bool = False,
        answers: Answers = MappingProxyType({}),
    ):
        """`packs`: cumulative outputs carry PackedLogprobs instead of lists, as the server needs."""
        self.packs, self.answers = packs, answers
        self.tap: Tap | None = None
        """Gets each output before this object does."""
        self.id, self.accepted, self.params = accepted.id, accepted, accepted.params
        self.tokenizer = tokenizer
        self.children = [
            OutputState(
                child.id,
                index,
                _detokenizer(accepted, tokenizer),
                _repetition_detector(accepted.params),
            )
            for index, child in enumerate(accepted.children)
        ]
        self.metrics = RequestMetrics(arrival_time=accepted.arrived, queued_ts=accepted.arrived)
        kind = self.params.output_kind
        self._ranked = len(self.children) > self.params.n
        self._at_the_end = self._ranked or kind == RequestOutputKind.FINAL_ONLY
        self._deltas = kind == RequestOutputKind.DELTA
        self._interval = self.params.stream_interval or 1
        self._wants_logprobs = (
            self.params.logprobs is not None or self.params.logprob_token_ids is not None
        )
        self.num_cached_tokens: int | None = None
        self.num_cache_creation_tokens: int | None = None
        self.loaded_tokens: dict[str, int] = {}
        self.prompt_logprobs: PromptLogprobs | None = None
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = PromptLogprobs(len(accepted.tokens), self._names)
        self._prompt_delivered = False
        self.finished = False
        self.failed = False
        """A child ended with an error."""

    @property
    def _names(self) -> Tokenizer | None:
        return self.tokenizer if self.params.detokenize else None

    # -- in -------------------------------------------------------------------------------------
    def add(self, index: int, output: EngineOutput, now: float) -> bool:
        """Add an engine output of child `index`. True: it ended here but the engine still runs it, so abort it."""
        child = self.children[index]
        if child.finish is not None:
            return False  # it ended here before the engine received the abort
        self._note_times(output, now)
        before = len(child.tokens)
        child.add(output)
        if self._wants_logprobs:
            self._add_logprobs(child, output.logprobs, len(child.tokens) - before)
        if output.prompt_logprobs is not None and self.prompt_logprobs is not None:
            self.prompt_logprobs.add(output.prompt_logprobs)
        if not child.ended:
            return False
        self.failed |= child.finish == "error"
        if all(one.finish is not None for one in self.children):
            self.finished = True
            self.metrics.finished_time = now
        return output.finish is None

    def _add_logprobs(self, child: OutputState, found: Logprobs | None, count: int) -> None:
        ranked = self.params.logprob_token_ids is None
        if child.logprobs is None:
            child.logprobs = PackedLogprobs(self._names, ranked) if self.packs else []
        if found is None:
            return
        if isinstance(child.logprobs, PackedLogprobs):
            child.logprobs.add(found, range(min(count, len(found.ranks))))
            return
        entries = positions(found, self._names, ranked)
        child.logprobs.extend(entry for entry, _ in zip(entries, range(count), strict=False))

    def _note_times(self, output: EngineOutput, now: float) -> None:
        metrics = self.metrics
        if output.tokens:
            metrics.first_token_ts = metrics.first_token_ts or now
            metrics.last_token_ts = now
            metrics.num_generation_tokens += len(output.tokens)
            if self.num_cached_tokens is None or output.num_cached_tokens > self.num_cached_tokens:
                self.num_cached_tokens = output.num_cached_tokens
                self.num_cache_creation_tokens = output.num_cache_creation_tokens
                self.loaded_tokens = output.loaded_tokens
        metrics.engine = output.engine
        metrics.resumed |= output.resumed
        if output.queued and not metrics.scheduled_ts:
            metrics.scheduled_ts = metrics.queued_ts + output.queued
        if output.preemptions > metrics.num_preemptions:
            metrics.num_preemptions = output.preemptions

    def end(self, finish: FinishReason, error: str | None = None) -> list[str]:
        """End all unfinished children; returns their ids, for the engine to abort."""
        ended = []
        for child in self.children:
            if child.finish is None:
                if child.detokenizer is not None:
                    child.detokenizer.end()
                child.finish, child.error = finish, error
                ended.append(child.id)
        self.finished = True
        self.failed |= finish == "error"
        self.metrics.finished_time = time.time()
        return ended

    # -- out ------------------------------------------------------------------------------------
    def take(self) -> RequestOutput | None:
        """The output to deliver now, of the requested `output_kind`; None if there is nothing to deliver."""
        if self._at_the_end and not self.finished:
            return None
        ready = [child for child in self.children if child.is_ready(self._interval)]
        if not ready:
            return None
        if self._ranked:
            scores = [child.cumulative or 0.0 for child in self.children]
            chosen = [self.children[index] for index in top_n(scores, self.params.n)]
            outputs = [self._completion(child, number) for number, child in enumerate(chosen)]
            for child in self.children:  # the others are not delivered
                child.delivered, child.end_delivered = len(child.tokens), True
        else:
            chosen = ready if self._deltas else self.children
            outputs = [self._completion(child, child.index) for child in chosen]
        return RequestOutput(
            self.id, self.accepted.prompt, self.accepted.tokens, self._take_prompt_logprobs(),
            outputs, self.finished, self.metrics, self.accepted.lora_request,
            num_cached_tokens=self.num_cached_tokens,
            num_cache_creation_tokens=self.num_cache_creation_tokens,
            cached_tokens_by_source=by_source(self.num_cached_tokens, self.loaded_tokens),
        )  # fmt: skip

    def _completion(self, child: OutputState, index: int) -> CompletionOutput:
        start, text = child.delivered if self._deltas else 0, ""
        if child.detokenizer is not None:
            text = child.detokenizer.take(child.finish is not None)
            if not self._deltas:
                text = child.detokenizer.settled
        child.delivered, child.end_delivered = len(child.tokens), child.finish is not None
        logprobs = None if child.logprobs is None else self._logprobs(child.logprobs, start)
        return CompletionOutput(
            index, text, child.tokens[start:], child.cumulative, logprobs, child.finish,
            child.stop_reason, self.accepted.lora_request, child.error, child.error_kind,
            self._details(child) if child.finish else {},
        )  # fmt: skip

    def _details(self, child: OutputState) -> dict[str, Any]:
        return {
            name: answer(child.details[name])
            for name, answer in self.answers.items()
            if name in child.details
        }

    def _logprobs(self, found: list[Position | None] | PackedLogprobs, start: int) -> Positions:
        if isinstance(found, PackedLogprobs) and not self._deltas:
            return found
        if not self.params.flat_logprobs:
            return found[start:]
        flat = FlatLogprobs()
        flat.extend(found[start:])
        return flat

    def _take_prompt_logprobs(self) -> Positions | None:
        if self.prompt_logprobs is None or (self._deltas and self._prompt_delivered):
            return None
        self._prompt_delivered = True
        return self.prompt_logprobs.result(self.params.flat_logprobs, self.packs)


def _repetition_detector(params: SamplingParams) -> RepetitionDetector | None:
    limits = params.repetition_detection
    return (
        RepetitionDetector(limits, params.min_tokens)
        if limits is not None and limits.max_pattern_size
        else None
    )


def _detokenizer(accepted: AcceptedRequest, tokenizer: Tokenizer | None) -> Detokenizer | None:
    params: SamplingParams = accepted.params
    if tokenizer is None or not params.detokenize:
        return None
    return Detokenizer(
        tokenizer,
        accepted.tokens,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
