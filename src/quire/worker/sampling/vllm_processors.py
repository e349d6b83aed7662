"""Adapter for logits processors that are written for vLLM.

Knows vLLM's interface and Quire's. Does not know how a class is found (`load_processors.py`). A vLLM processor has a
batch of its own, in which request i keeps index i until an update moves it:

    update_state(BatchUpdate or None)    requests that left, joined, moved; in this order: removed, added, moved
    apply(logits [B, V])                 one row of logits for each member of that batch

Quire's batch changes with every step, so `VllmProcessorAdapter` keeps a batch for the processor: a request joins it
when it draws its first token, and leaves with its row. Members that do not draw in a step get logits of zero.

Shape suffixes: S rows that draw, P of them that use the processor, B members of its batch, V vocabulary.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.logging import get_logger
from quire.protocol.plan import EnteredRow
from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.logits_processors import Processor, ProcessorRows, failure

log = get_logger(__name__)
State = TypeVar("State")


RequestLogitsProcessor = (
    Callable[[list[int], Tensor], Tensor] | Callable[[list[int], list[int], Tensor], Tensor]
)
"""A function for one request: (output ids, logits [V]) or (prompt ids, output ids, logits [V]) -> logits [V]."""


class MoveDirectionality(Enum):
    """What a move does to the index that the request moves to."""

    UNIDIRECTIONAL = auto()
    """The target index was free."""
    SWAP = auto()
    """The two requests exchange indices."""


RemovedRequest = int
"""Its index."""
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""(index, params, prompt ids, output ids); replaces the request at the index, if any."""
MovedRequest = tuple[int, int, MoveDirectionality]
"""(from, to, how)"""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a batch since the last step. `output_ids` of an added request is a list that grows."""

    batch_size: int
    """Size after the change."""
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Apply an update to a processor's own states of requests, which it keeps by index in the batch.

    Args:
        new_state: (params, prompt ids, output ids) -> the state of an added request; None: it needs none.

    Returns:
        whether `req_entries` changed.
    """
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        req_entries.pop(index, None)
        if (state := new_state(params, prompt_ids, output_ids)) is not None:
            req_entries[index] = state
    for start, end, how in batch_update.moved:
        mover, other = req_entries.pop(start, None), req_entries.pop(end, None)
        if mover is not None:
            req_entries[end] = mover
        if other is not None and how is MoveDirectionality.SWAP:
            req_entries[start] = other
    return before.keys() != req_entries.keys() or any(
        before[index] is not state for index, state in req_entries.items()
    )


class LogitsProcessor(ABC):
    """vLLM's interface. One instance serves all requests of a worker."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        return

    @classmethod  # noqa: B027 - may be left as it is
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if these parameters cannot be served."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Change logits [B, V], in place or in a new tensor."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True: it never changes which token is likeliest."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`; None: nothing changed but the output ids."""


class AdapterLogitsProcessor(LogitsProcessor):
    """For functions that serve one request: (output ids, logits [V]) or (prompt ids, output ids, logits [V])."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.functions: dict[int, Callable[[Tensor], Tensor]] = {}
        self.failed: dict[int, str] = {}  # errors of the last `apply`, by index in the batch

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request with these parameters; None: the request needs none."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.functions, batch_update, self._new_function)

    def _new_function(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        function = self.new_req_logits_processor(params)
        return None if function is None else _bound(function, prompt_ids, output_ids)

    def apply(self, logits: Tensor) -> Tensor:
        self.failed = {}
        for index, function in self.functions.items():
            try:
                logits[index] = function(logits[index])
            except Exception as error:  # fails this request only
                self.failed[index] = f"{type(error).__name__}: {error}"
        return logits


def _bound(
    function: RequestLogitsProcessor, prompt_ids: list[int] | None, output_ids: list[int]
) -> Callable[[Tensor], Tensor]:
    before = [output_ids] if len(inspect.signature(function).parameters) == 2 else [prompt_ids, output_ids]  # fmt: skip
    call: Callable[..., Tensor] = function
    return lambda logits_V: call(*before, logits_V)


class VllmProcessorAdapter(Processor):
    """Makes a Processor of an object with vLLM's methods (it need not be a subclass of `LogitsProcessor`)."""

    needs_tokens = True

    def __init__(self, inner: Any):
        self.inner = inner
        self.changes_argmax = not inner.is_argmax_invariant()
        self.accepts_drafts = bool(getattr(inner, "accepts_drafts", False))
        self.members: list[int | None] = []  # rows, by index in the processor's batch
        self.index: dict[int, int] = {}
        self.waiting: dict[int, EnteredRow] = {}  # rows that have not drawn yet
        self.outputs: dict[int, list[int]] = {}
        self.removed: list[int] = []  # indices freed since the last update

    @property
    def name(self) -> str:
        return type(self.inner).__name__

    def validate(self, params: SamplingParams) -> None:
        if (check := getattr(self.inner, "validate_params", None)) is not None:
            check(params)

    def enter(self, new: EnteredRow) -> bool:
        self.waiting[new.row] = new
        self.outputs[new.row] = list(new.tokens[new.num_prompt :])
        return True

    def leave(self, row: int) -> None:
        self.outputs.pop(row, None)
        if self.waiting.pop(row, None) is None and (index := self.index.pop(row, None)) is not None:
            self.members[index] = None
            self.removed.append(index)

    def on_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        for row, token in zip(rows, tokens, strict=True):
            self.outputs[row].append(token)

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        """One call of the processor for each place of rows with draft tokens, with the draft tokens before it as outputs."""
        firsts = np.flatnonzero(np.diff(selected.rows, prepend=-1))
        if len(firsts) == len(selected.rows):
            return self._apply(logits_SV, selected)
        place_P = np.arange(len(selected.rows))
        place_P -= np.repeat(firsts, np.diff(firsts, append=len(place_P)))
        known = {row: len(self.outputs[row]) for row in selected.rows[firsts].tolist()}
        try:
            for place in range(int(place_P.max()) + 1):
                part = selected.some(place_P == place)
                for row, length in zip(part.rows.tolist(), part.lengths.tolist(), strict=True):
                    outputs, start = self.outputs[row], int(part.state.num_prompt[row])
                    outputs += part.state.tokens_of(row, start + len(outputs), length)
                logits_SV = self._apply(logits_SV, part)
        finally:
            for row, count in known.items():
                del self.outputs[row][count:]
        return logits_SV

    def _apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        self.inner.update_state(self._update(selected.rows.tolist()))
        index_P = np.array([self.index[row] for row in selected.rows.tolist()], np.int64)
        device = logits_SV.device
        if len(self.members) == len(logits_SV) and (index_P == selected.indices).all():
            changed_BV = _checked(self.inner.apply(logits_SV), logits_SV)
            logits_SV = changed_BV
        else:
            at_P = torch.from_numpy(selected.indices).to(device)
            to_P = torch.from_numpy(index_P).to(device)
            logits_BV = logits_SV.new_zeros((len(self.members), logits_SV.shape[1]))
            logits_BV[to_P] = logits_SV[at_P]
            changed_BV = _checked(self.inner.apply(logits_BV), logits_BV)
            logits_SV[at_P] = changed_BV[to_P].to(logits_SV.dtype)
        if failed := getattr(self.inner, "failed", None):
            place = dict(zip(index_P.tolist(), selected.indices.tolist(), strict=True))
            for index, why in failed.items():
                if index in place:
                    log.error("logits processor %s failed: %s", self.name, why)
                    selected.errors.setdefault(place[index], failure(self.name))
        return logits_SV

    def _update(self, rows: list[int]) -> BatchUpdate | None:
        """Add rows that draw for the first time; fill gaps with the last members. None: nothing changed."""
        free, self.removed = sorted(self.removed, reverse=True), []
        added = []
        for row in rows:
            if (new := self.waiting.pop(row, None)) is None:
                continue
            index = free.pop() if free else len(self.members)
            if index == len(self.members):
                self.members.append(row)
            self.members[index], self.index[row] = row, index
            prompt_ids = list(new.tokens[: new.num_prompt])
            added.append((index, new.sampling_params, prompt_ids, self.outputs[row]))
        moved = []
        removed = list(free)
        for gap in sorted(free):
            while self.members and self.members[-1] is None:
                self.members.pop()
            if gap >= len(self.members):
                break
            last = len(self.members) - 1
            row_moved = self.members.pop()
            if row_moved is not None:
                self.members[gap], self.index[row_moved] = row_moved, gap
                moved.append((last, gap, MoveDirectionality.UNIDIRECTIONAL))
        if not (added or removed):
            return None
        return BatchUpdate(len(self.members), removed, added, moved)


def _checked(changed: Any, before: Tensor) -> Tensor:
    if not isinstance(changed, Tensor) or changed.shape != before.shape:
        what = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise TypeError(f"apply must return logits of shape {tuple(before.shape)}, not {what}")
    return changed


def is_vllm_processor(kind: type) -> bool:
    """Whether a class has the methods of vLLM's interface."""
    return all(
        callable(getattr(kind, name, None))
        for name in ("apply", "update_state", "is_argmax_invariant")
    )


def adapt_processor(
    kind: type, config: Any = None, device: torch.device | str = "cpu"
) -> VllmProcessorAdapter:
    """Make a processor of a class for vLLM; its constructor gets the parts of vLLM's config that such classes read."""
    return VllmProcessorAdapter(kind(config_of(config), torch.device(device), False))


def config_of(resolved: Any) -> SimpleNamespace:
    """The parts of vLLM's config that processors read."""
    if resolved is None:
        return SimpleNamespace(speculative_config=None)
    hf = SimpleNamespace(**resolved.hf_config)
    vocab = resolved.hf_config.get("vocab_size")
    return SimpleNamespace(
        speculative_config=None,
        scheduler_config=SimpleNamespace(
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
        ),
        model_config=SimpleNamespace(
            model=resolved.config.model.model,
            tokenizer=resolved.tokenizer_folder,
            skip_tokenizer_init=resolved.config.model.skip_tokenizer_init,
            trust_remote_code=resolved.config.model.trust_remote_code,
            max_model_len=resolved.max_model_len,
            dtype=getattr(torch, resolved.dtype),
            hf_config=hf,
            hf_text_config=hf,
            get_vocab_size=lambda: vocab,
        ),
    )
