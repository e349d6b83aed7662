"""Messages between the grammar processes and their clients.

Knows the message types. Does not know how a message is sent (`processes/isolated_child.py`) or handled.
"""

from __future__ import annotations

import struct

from msgspec import Struct

from quire.protocol.structured_outputs import StructuredOutputsParams

STEP_CPU_S = 0.1  # processor time for a message; the hardest mask of a normal grammar takes 0.03 s


# -- to the fork server --------------------------------------------------------------------------------
class Prepare(Struct, array_like=True):
    """The first message."""

    tokenizer: str | None
    """The text of a tokenizer.json; None: only check grammars."""
    size: int


class PrepareReply(Struct, array_like=True):
    """The answer to `Prepare`."""

    words: int = 0
    """Size of a mask in words of 32 tokens."""
    error: str | None = None


ORDER = struct.Struct(">BQ")
"""Each later message: an order (FORK, END), and the number of a process."""
FORK, END = 1, 2  # fork a process that serves the attached socket; kill it


# -- to a grammar's process -----------------------------------------------------------------------
class Check(Struct, array_like=True, tag=True):
    """Check a constraint without a vocabulary."""

    constraint: StructuredOutputsParams
    cpu_s: float


class Compile(Struct, array_like=True, tag=True):
    """Compile the grammar and compute its first mask."""

    constraint: StructuredOutputsParams
    cpu_s: float
    memory: int
    nice: int


class CompileReply(Struct, array_like=True):
    """The answer to `Check` and `Compile`."""

    bytes: int = 0
    error: str | None = None
    cause: str = ""
    """The exception that caused the error, for the log."""


class GrammarRowSettings(Struct, array_like=True):
    """A request's settings for the end of its output and for forced tokens."""

    ends: list[int]
    """Tokens that end the output."""
    ends_late: bool
    """`ignore_eos`: the output ends only where no other token is allowed."""
    room: int
    """Maximum number of output tokens."""
    end_at: int
    """From this length on, the end token of a finished grammar is forced."""
    jumps: bool
    """Feed forced tokens at once, without sampling."""


class Begin(Struct, array_like=True, tag=True):
    """A row enters, with its output so far."""

    number: int
    settings: GrammarRowSettings
    outputs: list[int]


class Step(Struct, array_like=True, tag=True):
    """Sampled tokens: (row number, tokens)."""

    rows: list[tuple[int, list[int]]]


class LookAhead(Struct, array_like=True, tag=True):
    """Draft tokens that may follow: (row number, tokens, the most that the row may have)."""

    rows: list[tuple[int, list[int], int]]


class Drop(Struct, array_like=True, tag=True):
    """A row has left. There is no answer."""

    number: int


class ForcedReply(Struct, array_like=True):
    """The first answer to a step: the forced tokens of each of its rows."""

    forced: list[list[int]]


class MaskReply(Struct, array_like=True):
    """The last answer to a step, and the answer to `Begin`. The masks of its rows follow as one message."""

    over: list[bool]
    """Only an end-of-text token is allowed."""
    errors: list[str | None]
    bytes: int
    """Private memory of the process."""


class LookAheadReply(Struct, array_like=True):
    """The answer to `LookAhead`, by row. The masks after each of the draft tokens follow as one message."""

    drafts: list[list[int]]
    """Those that may follow."""
    over: list[list[bool]]
    """As in `MaskReply`, after each of them."""
