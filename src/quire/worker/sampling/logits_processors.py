"""Processor: the base class of logits processors, and the pipeline that applies those that a step needs.

Knows rows, logits and the order of processors. Does not know the draw. A processor that no row of the step uses
costs one comparison. To write your own, see `Processor`; `vllm_processors.py` adapts classes that are written for
vLLM, and `load_processors.py` finds both kinds.

Shape suffixes: S rows that draw a token in this step, P of them that use a processor, V vocabulary, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.logging import get_logger
from quire.ops.masked_argmax import num_words
from quire.protocol.plan import EnteredRow
from quire.protocol.sampling_params import SamplingParams
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.sampled_step import ProcessorFault, RequestFault

log = get_logger(__name__)


@dataclass(slots=True)
class ProcessorRows:
    """The rows of a step that use a processor."""

    indices: np.ndarray  # int64 [P]: indices in S
    rows: np.ndarray  # int64 [P]: row numbers of the worker
    lengths: np.ndarray  # int64 [P]: tokens before the one being drawn
    state: RequestRows
    errors: dict[int, str] = field(default_factory=dict)  # by index in S: fails this row alone

    def some(self, which_P: np.ndarray) -> ProcessorRows:
        """A part of these."""
        parts = (self.indices[which_P], self.rows[which_P], self.lengths[which_P])
        return ProcessorRows(*parts, self.state, self.errors)

    @property
    def outputs(self) -> np.ndarray:
        """int64 [P]: output tokens before the one being drawn."""
        return self.lengths - self.state.num_prompt[self.rows]


class Processor:
    """Override `enter` and `apply`, and other methods as needed.

    One instance serves all rows of a worker. State of a request must be kept by row number.
    """

    changes_argmax = True
    """False: the processor never changes which token is likeliest. Then it gets logits divided by the temperature,
    and runs only in steps where some row is not greedy."""
    mask_only = False
    """True: the processor only excludes tokens, and `mask` says which. Steps of greedy rows then need no float32
    logits: the argmax runs over the tokens that are left."""
    needs_tokens = False
    """True: `on_tokens` is called with each step's tokens (which makes the host wait for the device)."""

    order = 0
    """Processors run in ascending order. 0: processors of users, in the order in which they are configured; 50 ... 99: features
    that decide which tokens are allowed."""

    accepts_drafts = False
    """True: the result depends only on the request and on the tokens before the position (`ProcessorRows.lengths`), so it
    can be computed at several positions of a row in one step, which are in S one after the other. Rows that use another
    processor get no draft tokens."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def looks_ahead(self) -> bool:
        """Whether `look_ahead` may find draft tokens now."""
        return False

    def validate(self, params: SamplingParams) -> None:
        """Raise ValueError if these parameters cannot be served."""

    def enter(self, new: EnteredRow) -> bool:
        """A request takes a row (again, after a preemption). Return whether it uses this processor."""
        raise NotImplementedError

    def leave(self, row: int) -> None:
        """A row that uses this processor is freed."""

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        """Change float32 logits of the picked rows, in place or in a new tensor, and return all S rows.

        To fail one row, put a message in picked.errors. An exception fails all picked rows, and no others.
        """
        raise NotImplementedError

    def mask(self, words_SW: np.ndarray, selected: ProcessorRows) -> None:
        """Clear the bits of excluded tokens in the picked rows' masks; token t is bit t % 32 of word t // 32.

        Called instead of `apply` if `mask_only`, with the same handling of errors.
        """
        raise NotImplementedError

    def look_ahead(self, drafts: dict[int, list[int]], most: dict[int, int]) -> None:
        """Rows will verify these draft tokens in their next step. Cut or replace the draft tokens of rows that use this processor.

        Called after all tokens of the step before are known. `most`: of each row that drew a token, how many it may have;
        a row without draft tokens may be missing in `drafts`.
        """

    def on_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Receives the tokens that the step adds to rows, in order, if `needs_tokens`."""


class LogitsPipeline:
    """The processors in order, and which rows use which."""

    def __init__(self, rows: RequestRows, processors: Sequence[Processor]):
        self.rows, self.processors = rows, list(processors)
        self.uses = np.zeros((len(self.processors), rows.max_rows), bool)
        self.counts = [0] * len(self.processors)
        self.needs_tokens = any(processor.needs_tokens for processor in self.processors)

    def enter(self, new: EnteredRow) -> RequestFault | None:
        """The error with which this request must fail, if a processor rejects it."""
        for index, processor in enumerate(self.processors):
            try:
                processor.validate(new.sampling_params)
                if processor.enter(new):
                    self.uses[index, new.row] = True
                    self.counts[index] += 1
            except ValueError as error:
                return RequestFault(f"{processor.name}: {error}")
            except Exception:
                log.exception("logits processor %s failed", processor.name)
                return failure(processor.name)
        return None

    def accepts_drafts(self, row: int) -> bool:
        """Whether all processors that the row uses can run at several positions of it in one step."""
        used = self.uses[:, row].nonzero()[0].tolist()
        return all(self.processors[index].accepts_drafts for index in used)

    def leave(self, row: int) -> None:
        for index in self.uses[:, row].nonzero()[0]:
            self.uses[index, row] = False
            self.counts[index] -= 1
            self.processors[index].leave(row)

    def stage(self, rows_S: np.ndarray, changes_argmax: bool) -> list[tuple[Processor, np.ndarray]]:
        """The processors of this stage that rows of this step use, with the indices of those rows in S."""
        found: list[tuple[Processor, np.ndarray]] = []
        if not any(self.counts):
            return found
        for index, processor in enumerate(self.processors):
            if self.counts[index] and processor.changes_argmax == changes_argmax:
                indices = self.uses[index, rows_S].nonzero()[0]
                if len(indices):
                    found.append((processor, indices))
        return found

    def apply(
        self,
        stage: Sequence[tuple[Processor, np.ndarray]],
        logits_SV: Tensor,
        rows_S: np.ndarray,
        lengths_S: np.ndarray,
        errors: dict[int, str],
    ) -> Tensor:
        """Run a stage. Puts the errors of rows in `errors`, by index in S."""
        for processor, indices in stage:
            selected = ProcessorRows(
                indices, rows_S[indices], lengths_S[indices], self.rows, errors
            )
            try:
                logits_SV = processor.apply(logits_SV, selected)
            except Exception:
                _fail_rows(processor, selected)
        return logits_SV

    def masks(
        self,
        stage: Sequence[tuple[Processor, np.ndarray]],
        vocab: int,
        rows_S: np.ndarray,
        lengths_S: np.ndarray,
        errors: dict[int, str],
    ) -> Tensor | None:
        """Run a stage that only excludes tokens: masks of those left, int32 [S, W]; None: all are left."""
        if not stage:
            return None
        words_SW = np.full((len(rows_S), num_words(vocab)), -1, np.int32)
        for processor, indices in stage:
            selected = ProcessorRows(
                indices, rows_S[indices], lengths_S[indices], self.rows, errors
            )
            try:
                processor.mask(words_SW, selected)
            except Exception:
                _fail_rows(processor, selected)
        return torch.from_numpy(words_SW).to(self.rows.device, non_blocking=True)

    def on_tokens(self, rows_S: np.ndarray, tokens: list[int]) -> None:
        """Pass drawn tokens to the processors with `needs_tokens`."""
        for index, processor in enumerate(self.processors):
            if processor.needs_tokens and self.counts[index]:
                indices = self.uses[index, rows_S].nonzero()[0]
                processor.on_tokens(rows_S[indices].tolist(), [tokens[i] for i in indices])


def allow_only_in_mask(words_W: np.ndarray, tokens: Sequence[int]) -> None:
    """Make the mask allow these tokens only."""
    words_W[:] = mask_of(np.array(tokens, np.int64), len(words_W))


def mask_of(tokens: np.ndarray, num_words: int) -> np.ndarray:
    """A mask, int32 [W], with the bits of these tokens set."""
    words_W = np.zeros(num_words, np.uint32)
    np.bitwise_or.at(words_W, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))
    return words_W.view(np.int32)


def _fail_rows(processor: Processor, selected: ProcessorRows) -> None:
    """Fail all picked rows."""
    log.exception("logits processor %s failed", processor.name)
    for index in selected.indices.tolist():
        selected.errors.setdefault(index, failure(processor.name))


def failure(name: str) -> ProcessorFault:
    """A request's error for an exception of a processor."""
    return ProcessorFault(f"logits processor {name} failed; the log has the exception")
