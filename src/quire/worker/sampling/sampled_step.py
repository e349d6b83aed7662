"""SampledStep: what a step drew, while it is copied from the device to the host.

Knows tensors of a step and where they belong in its result. Does not know how they were computed. On an
accelerator the copies are queued with the step, and `result` waits for these alone.

Shape suffixes: S rows that draw.
"""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import torch
from torch import Tensor

from quire.errors import NOT_FINITE
from quire.protocol.output import ErrorKind, Logprobs
from quire.protocol.plan import StepResult
from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.logprobs import ScoredTokens

EXCLUDING_FIELDS = (
    "structured_outputs", "allowed_token_ids", "bad_words", "logit_bias", "min_tokens", "thinking_token_budget",
)  # fmt: skip
"""Fields of SamplingParams that exclude tokens."""


def no_token_left(params: SamplingParams | None) -> str:
    """The error of a request with no token left to choose; names the fields that exclude tokens."""
    fields = [name for name in EXCLUDING_FIELDS if getattr(params, name, None)]
    match fields:
        case []:
            why = "its logits processors exclude them all"
        case [one]:
            why = f"{one} excludes them all"
        case [*others, last]:
            why = f"{', '.join(others)} and {last} together exclude them all"
    return f"no token is left to sample: {why}; allow more tokens"


class RequestFault(str):
    """An error of one row that its request caused: an invalid request, not a server error."""

    __slots__ = ()
    kind: ClassVar[ErrorKind] = "invalid"


class OverloadedFault(RequestFault):
    """The machine had too little time for the request. The same request may succeed later."""

    __slots__ = ()
    kind = "overloaded"


class ProcessorFault(RequestFault):
    """An exception of a logits processor."""

    __slots__ = ()
    kind = "processor"


class SampledStep:
    """A queued step. `items[s]` is the work item of draw s of S."""

    def __init__(self, step: int, num_items: int):
        self.step, self.num_items = step, num_items
        self.items: list[int] = []
        self.positions: list[int] = []  # of the draws: the tokens before each
        # False: drawn after a wrong draft token; None: all are kept
        self.continues_S: list[bool] | None = None
        self.tokens_S: Tensor | None = None
        self.max_logit_S: Tensor | None = None  # the highest logit; not finite: the model failed
        # the highest logit that is allowed; None: all are
        self.max_allowed_logit_S: Tensor | None = None
        # of the rows of S, if `max_allowed_logit_S` is set
        self.params: list[SamplingParams | None] = []
        self.scored: list[tuple[ScoredTokens, list[int]]] = []  # each with its draws, indices of S
        self.prompts: dict[int, tuple[int, ScoredTokens]] = {}  # by item: first position, scores
        self.errors: dict[int, str] = {}  # by item
        self.draw_errors: dict[int, str] = {}  # by index of S
        self.event: torch.Event | None = None

    def continues(self, index: int) -> bool:
        """Whether the draw `index` of S continues its row."""
        return self.continues_S is None or self.continues_S[index]

    def faulty_draws(self) -> set[int]:
        """Indices of S of the draws that fail their requests. Waits for the device."""
        highest = (self.max_logit_S, self.max_allowed_logit_S)
        return {*self.draw_errors, *itertools.chain(*map(_not_finite, highest))}

    def copy_to_host(self) -> None:
        """Queue the copies to the host. On the CPU there is nothing to copy."""
        if self.tokens_S is not None and self.tokens_S.device.type != "cpu":
            device = self.tokens_S.device
            self.tokens_S = self.tokens_S.to("cpu", non_blocking=True)
            if self.max_logit_S is not None:
                self.max_logit_S = self.max_logit_S.to("cpu", non_blocking=True)
            if self.max_allowed_logit_S is not None:
                self.max_allowed_logit_S = self.max_allowed_logit_S.to("cpu", non_blocking=True)
            for scored, _ in self.scored:
                scored.to_host()
            for _, scored in self.prompts.values():
                scored.to_host()
            self.event = torch.Event(device)
            self.event.record()

    def result(self) -> StepResult:
        """Wait for the copies and build the StepResult."""
        if self.event is not None:
            self.event.synchronize()
        tokens: list[list[int]] = [[] for _ in range(self.num_items)]
        errors = {
            self.items[index]: e for index, e in self.draw_errors.items() if self.continues(index)
        }
        errors |= self.errors
        if self.tokens_S is not None:
            for index, token in enumerate(self.tokens_S.tolist()):
                if self.continues(index):
                    tokens[self.items[index]].append(token)
            for index in filter(self.continues, _not_finite(self.max_logit_S)):
                errors.setdefault(self.items[index], NOT_FINITE)
            for index in filter(self.continues, _not_finite(self.max_allowed_logit_S)):
                if (item := self.items[index]) not in errors:
                    errors[item] = RequestFault(no_token_left(self.params[index]))
        logprobs: dict[int, Logprobs] = {}
        for scored, draws in self.scored:
            right = ((place, index) for place, index in enumerate(draws) if self.continues(index))
            for item, run in itertools.groupby(right, lambda draw: self.items[draw[1]]):
                (first, index), *others = run
                end = first + 1 + len(others)
                logprobs[item] = scored.report(self.positions[index], first, end)
        prompts = {item: scored.report(start) for item, (start, scored) in self.prompts.items()}
        kinds = {item: text.kind for item, text in errors.items() if isinstance(text, RequestFault)}
        texts = {item: str(text) for item, text in errors.items()}
        return StepResult(self.step, tokens, logprobs, prompts, texts, kinds)


def _not_finite(highest_S: Tensor | None) -> list[int]:
    """Rows of S whose highest logit is not finite."""
    if highest_S is None:
        return []
    return [index for index, value in enumerate(highest_S.tolist()) if not math.isfinite(value)]
