"""Messages between the engine and the processes that follow grammars: each is its length and its bytes.

Knows sockets and the messages' types. Does not know what a message asks for.
"""

from __future__ import annotations

import socket
import struct
import time

from msgspec import Struct

from quire.features.structured.grammar_rows import PlaceSettings
from quire.protocol.structured_outputs import StructuredOutputsParams

STEP_CPU_S = (
    0.1  # of processor time for a message; the hardest mask of an honest grammar takes about 0.03 s
)
MOST = 1 << 30  # bytes of a message: masks of 8,192 rows and a million tokens


class ProcessEnded(Exception):
    """The process at the other end has ended, or did not answer in time."""


# -- to the forker --------------------------------------------------------------------------------
class Prepare(Struct, array_like=True):
    """The first message."""

    tokenizer: str | None
    """The text of a tokenizer.json; None: grammars are only checked."""
    size: int
    xgrammar: bool


class Prepared(Struct, array_like=True):
    """The answer to it."""

    words: int = 0
    """How many words of 32 tokens a mask has."""
    error: str | None = None


ORDER = struct.Struct(">BQ")
"""Each later message: what is to be done, and the number of a process."""
FORK, END = 1, 2  # make a process, which serves the socket that comes with this message; kill it


# -- to a grammar's process -----------------------------------------------------------------------
class Check(Struct, array_like=True, tag=True):
    """Read the grammar without a vocabulary."""

    constraint: StructuredOutputsParams
    engine: str
    second: bool
    cpu_s: float


class Compile(Struct, array_like=True, tag=True):
    """Compile the grammar and compute its first mask."""

    constraint: StructuredOutputsParams
    cpu_s: float
    memory: int
    nice: int


class Compiled(Struct, array_like=True):
    """The answer to both."""

    bytes: int = 0
    refused: str | None = None


class Begin(Struct, array_like=True, tag=True):
    """A row enters, with what it has put out."""

    number: int
    settings: PlaceSettings
    outputs: list[int]


class Step(Struct, array_like=True, tag=True):
    """Rows have drawn tokens."""

    rows: list[tuple[int, int]]


class Drop(Struct, array_like=True, tag=True):
    """A row has left. There is no answer."""

    number: int


class Fed(Struct, array_like=True):
    """The first answer to a step: for each of its rows, what is forced next."""

    forced: list[list[int]]


class Filled(Struct, array_like=True):
    """The last answer to a step, and the answer to `Begin`. The masks of its rows follow as one message."""

    over: list[bool]
    """Only an end may come."""
    errors: list[str | None]
    bytes: int
    """How much memory the process has taken so far."""


# -- sending --------------------------------------------------------------------------------------
def send(pipe: socket.socket, data: bytes | memoryview) -> None:
    """Raises ProcessEnded."""
    try:
        pipe.sendall(len(data).to_bytes(4))
        pipe.sendall(data)
    except OSError as error:
        raise ProcessEnded(str(error)) from error


def receive(pipe: socket.socket, until: float | None = None) -> bytearray:
    """Raises ProcessEnded. `until` is in the time of `time.monotonic`."""
    size = int.from_bytes(_read(pipe, 4, until))
    if size > MOST:
        raise ProcessEnded(f"a message of {size} bytes")
    return _read(pipe, size, until)


def _read(pipe: socket.socket, size: int, until: float | None) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    try:
        while rest:
            if until is not None:
                pipe.settimeout(max(until - time.monotonic(), 0.001))
            if not (got := pipe.recv_into(rest)):
                raise ProcessEnded("no more")
            rest = rest[got:]
    except OSError as error:
        raise ProcessEnded(str(error)) from error
    return found
