"""RowGrammar: the grammar state of a row, on the worker's side.

Knows the row's output, its mask, its process and its faults. Does not know how they are used (`masks.py`).

Shape suffixes: N rows of one process, W words of 32 tokens.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.features.structured.grammar_messages import GrammarRowSettings, MaskReply
from quire.features.structured.grammar_process import GrammarProcess
from quire.protocol.structured_outputs import FIELD, StructuredOutputsParams
from quire.worker.sampling.sampled_step import RequestFault

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True, eq=False)
class RowGrammar:
    """The grammar state of a row. Belongs to the thread while `job` or `restart` runs, except `has_left`."""

    row: int
    number: int  # identifies the row in its grammar's process
    constraint: StructuredOutputsParams
    compiled: Future[GrammarProcess]
    settings: GrammarRowSettings
    start: int  # position of the first output token
    tokens: list[int]  # the output so far, with the forced tokens that follow
    process: GrammarProcess | None = None
    deaths: int = 0  # how often the row's process ended
    over: bool = False  # only an end-of-text token is allowed now
    error: str | None = None
    has_left: bool = False
    job: Future[None] | None = None
    restart: Future[None] | None = None  # entering a new process, which may take long
    mask_W: np.ndarray | None = None  # of the next token; None: it has not come
    looks_ahead: bool = True  # False: no draft tokens, since looking ahead failed
    # after each draft token: whether only an end-of-text token may follow, and the mask
    ahead: list[tuple[bool, np.ndarray]] = field(default_factory=list)

    def fail(self, why: str, fault: type[RequestFault] = RequestFault) -> None:
        """Set the row's error, which names the request field that the client used."""
        self.error = fault(f"{self.field}: {why}")

    @property
    def field(self) -> str:
        """The request's field that holds the constraint."""
        said, kind = self.constraint.field_name, self.constraint.kind
        return said if said != FIELD else f"{said}.{kind}"

    def update(self, reply: MaskReply, masks_NW: np.ndarray, index: int) -> None:
        """Read the row's part of a process's answer."""
        self.over, self.mask_W = reply.over[index], masks_NW[index]
        if reply.errors[index] is not None:
            self.fail(reply.errors[index] or "")
