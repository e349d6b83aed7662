"""ForwardBatch: the tensors of one forward pass, and how layers reach them.

A model does not see the batch: it gets (embeddings, positions). Layers call `current_batch()`.

Shape suffixes: T tokens of this step, B rows (requests), B1 = B + 1, M blocks a row, S sampled positions.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.parallel.prefill_context_parallel import SplitTokens


ADAPTERS = "adapters_T"
"""The extra tensor of a batch with the number of each token's adapter; -1: none."""
KEPT_STATES = "kept_states_T"
"""The extra tensor of a batch with the entry of recurrent states that keeps a copy of the state after each token; 0: none."""
TOKEN_TYPES = "token_types_T"
"""The extra tensor of a batch: 1 for the tokens of the second text of a pair, else 0. Absent: all are 0."""


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class EncoderStates:
    """The encoder's states that the rows of a step attend to (`layers/cross_attention.py`)."""

    lengths: list[int]  # by row of the batch
    new_rows: list[int]  # indices in B of the rows whose keys and values this step writes
    states_SD: Tensor | None = None  # of these, one row after the other; a hook sets it
    adapters_S: Tensor | None = None  # of these; None: as `ADAPTERS` of the batch, none


class SeenSpan(NamedTuple):
    """Tokens of a row that see each other, in both directions, and all tokens before them; all are in this step.

    Attributes:
        at, length: the first of them in T, and how many.
        row: in B.
        start, end: positions of the first, and of the last + 1. The first tokens of a span may have been computed before this
            step; then `start` is the first that this step computes.
        windows_only: they do so only in layers with a window.
        ignores_windows: also tokens that are further away than a layer's window.
    """

    at: int
    length: int
    row: int
    start: int
    end: int
    windows_only: bool = False
    ignores_windows: bool = False


@dataclass(slots=True)
class ForwardBatch:
    """One step, as tensors. Row b has the tokens query_start_B1[b] : query_start_B1[b + 1]."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64: the token's index in its request
    rows_B: Tensor  # int64: the worker's row of each request
    query_start_B1: Tensor  # int32
    lengths_B: Tensor  # int32: context length of each row, this step's tokens included
    block_tables: list[Tensor]  # by KV group, int32 [B, M]
    slots: list[Tensor]  # by KV group, int64 [T]: block * block_size + offset of each token
    sample_at_S: Tensor  # int64: which of the T positions need logits
    max_query: int  # the most tokens that a row has in this step (known to the host)
    max_length: int  # the longest context (known to the host)
    num_tokens: int  # before padding
    num_rows: int  # before padding
    # host copies, by row: query lengths and context lengths
    query_lens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    # host copies for the rows that draw a token, in the order of sample_at_S: index in B, worker's row, context length
    drawing: list[int] = field(default_factory=list)
    # (a row whose draft tokens the step verifies is here several times, one after the other)
    rows_S: np.ndarray = field(default_factory=_none)  # on the host: the worker's rows of these
    lengths_S: np.ndarray = field(default_factory=_none)  # and their contexts
    # the attention backend's metadata, by KV group
    meta: dict[int, Any] = field(default_factory=dict)
    # tensors that features add, by name. The name ends with the letters of the dimensions; the first is T or B
    extras: dict[str, Tensor] = field(default_factory=dict)
    # embeddings that hooks put in the place of some tokens': (which of the T tokens [N], [N, D]), applied in order
    embeddings: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    # states that hooks add to some tokens' after a number of layers: (which of the T tokens [N], [N, D])
    added_states: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    spans: list[SeenSpan] = field(default_factory=list)  # tokens that see later tokens of their row
    run_starts: dict[str, Tensor] = field(default_factory=dict)
    """Of runs of tokens within rows that some layers of an encoder attend in, by kind: int32 [runs + 1]."""
    span_meta: dict[Any, Any] = field(default_factory=dict)  # of these: attention/spans.py
    encoder: EncoderStates | None = None  # of a model with cross attention
    # what the model records (`LanguageModel.record_hidden_states`), by number of layers: [T, D]
    hidden_states: dict[int, Tensor] = field(default_factory=dict)
    # if ranks compute the other tokens of the step (prefill context parallelism): `slots` has the slots of all tokens, by place
    split_tokens: SplitTokens | None = None
    whole: ForwardBatch | None = None  # then the batch of all tokens of the step

    @property
    def needs_modules(self) -> bool:
        """Whether the step needs what only the model's modules do, and not the CPU's larger calls: keys that ranks gather, states
        that are added between layers, and tokens that see later ones."""
        return self.split_tokens is not None or bool(self.added_states or self.spans)

    def starts_of(self, runs: str | None) -> Tensor:
        """Where the runs of a kind begin, and the end of the last; None: the rows."""
        return self.query_start_B1 if runs is None else self.run_starts[runs]

    def first_draws(self) -> list[tuple[int, int, int]]:
        """Of each row that draws: its index in B, the worker's row, and the position of its first draw."""
        draws = zip(self.drawing, self.rows_S.tolist(), self.lengths_S.tolist(), strict=True)
        return [next(own) for _, own in itertools.groupby(draws, lambda draw: draw[0])]

    def of_tokens(self, at: slice | Tensor) -> ForwardBatch:
        """A batch with some of the tokens, for modules that read extra tensors by token."""
        if not self.extras:
            return self
        named = self.extras.items()
        return replace(self, extras={n: t[at] if n[-1] == "T" else t for n, t in named})


def packed_batch(
    lengths: Sequence[int], device: torch.device, runs: Mapping[str, Sequence[int]] | None = None
) -> ForwardBatch:
    """A batch of whole sequences without a KV cache, one after the other: for encoders beside the model of a step.

    runs: lengths of runs of tokens, by kind; see `ForwardBatch.run_starts`.
    """
    import torch

    def starts(lengths: Sequence[int]) -> Tensor:
        sums = [0, *itertools.accumulate(lengths)]
        return torch.tensor(sums, dtype=torch.int32, device=device)

    starts_B1 = starts(lengths)
    count, total, none = (
        len(lengths),
        sum(lengths),
        torch.empty(0, dtype=torch.int64, device=device),
    )
    return ForwardBatch(
        token_ids_T=none, positions_T=none, rows_B=none, query_start_B1=starts_B1, lengths_B=starts_B1.diff(),
        block_tables=[], slots=[], sample_at_S=none, max_query=max(lengths), max_length=max(lengths),
        num_tokens=total, num_rows=count, query_lens=list(lengths), lengths=list(lengths),
        run_starts={kind: starts(each) for kind, each in (runs or {}).items()},
    )  # fmt: skip


class _Thread(threading.local):
    """Per thread, because two engines in one process may run at once."""

    batch: ForwardBatch | None = None
    adapters: Tensor | int | None = None  # where the batch does not say them


_running = _Thread()


@contextmanager
def forward_context(batch: ForwardBatch) -> Iterator[None]:
    """Make `batch` the one that layers see. Forward passes do not nest."""
    if _running.batch is not None:
        raise RuntimeError("a forward pass is already running")
    _running.batch = batch
    try:
        yield
    finally:
        _running.batch = None


@contextmanager
def replace_current_batch(batch: ForwardBatch) -> Iterator[None]:
    """Inside a forward pass: layers see `batch`, a captured graph's static tensors, instead of the step's batch."""
    outer, _running.batch = current_batch(), batch
    try:
        yield
    finally:
        _running.batch = outer


def current_batch() -> ForwardBatch:
    """The batch of this thread's forward pass."""
    batch = _running.batch
    if batch is None:
        raise RuntimeError("no forward pass is running")
    return batch


@contextmanager
def adapter_context(adapters: Tensor | int | None) -> Iterator[None]:
    """Modules apply these adapters, in the place of the batch's: one number for all that they compute, or a number for each token.
    For encoders, which compute other tokens than the batch has. None: the batch's."""
    outer, _running.adapters = _running.adapters, adapters
    try:
        yield
    finally:
        _running.adapters = outer


def current_adapters(x_T: Tensor) -> Tensor | None:
    """numbers_T: the adapters of the tokens that the running forward pass computes; None: no token has one.

    x_T: what a module computes, with the tokens in its first dimension.
    """
    adapters = _running.adapters
    if isinstance(adapters, int):
        import torch

        return x_T.new_full(x_T.shape[:1], adapters, dtype=torch.int64)
    if adapters is not None:
        return adapters
    batch = _running.batch
    return None if batch is None else batch.extras.get(ADAPTERS)
