"""JournalEntry: one background response in the journal.

    begin     the request, the prompt's tokens, the seed
    outputs   the engine's outputs that made each delta; made again from them, events are the same, with the same numbers
    end       its last events and its object, where outputs do not say them: it failed, or was cancelled

A client gets an event only when what made it is on disk, so no event changes. Knows outputs and events. Does not know requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from quire.api.async_engine import AsyncEngine, OutputStream
from quire.protocol.output import EngineOutput
from quire.server.journal import BEGIN, END, OUTPUTS, Journal
from quire.server.response_store import StoredResponse

Outputs = list[EngineOutput]


class ResponseJournal(Protocol):
    """`JournaledResponses`, as other modules know it."""

    def open(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def restore(self, state: Any, app: Any) -> None: ...
    def entry(self, record: StoredResponse) -> JournalEntry: ...
    def begin(self, entry: JournalEntry, answer: Any, stream: OutputStream) -> None: ...
    def close(self) -> None: ...


class BegunResponse(msgspec.Struct):
    """The record of its beginning.

    Attributes:
        owner, key: the tenant that asked, and a digest of its key: another key with this name does not get the response.
        model: a digest of the checkpoint and its dtype.
    """

    owner: str
    key: str
    model: str
    created: int
    seed: int | None
    text: str | None
    tokens: list[int]
    body: bytes


class EndedResponse(msgspec.Struct):
    """The record of an end that outputs do not say."""

    body: bytes
    events: list[bytes]


class JournaledEnd(Exception):
    """A restored response ended so before."""

    def __init__(self, end: EndedResponse):
        super().__init__("it ended before")
        self.end = end


class JournalEntry:
    """One response that runs. `earlier`: the outputs of its earlier life, by delta."""

    def __init__(self, journal: Journal, record: StoredResponse, earlier: Sequence[bytes] = (), end: bytes = b""):  # fmt: skip
        self.journal, self.record = journal, record
        self.earlier, self._end = deque(earlier), end
        self.waits = bool(earlier or end)
        """The engine does not get it before `replay` is done."""
        self.tokens: list[int] = []
        self._group: Outputs = []
        self._position = 0
        self._marks: deque[tuple[int, int]] = deque()
        """(position in the journal, number of events that are visible when it is on disk)."""
        record.num_visible = 0

    def tap(self, output: EngineOutput) -> None:
        self._group.append(output)

    def taken(self) -> None:
        """A delta was made of all outputs so far."""
        if self._group:
            data = msgspec.msgpack.encode(self._group)
            self._position = self.journal.append(OUTPUTS, self.record.id, data)
            self._group = []

    async def replay(self, engine: AsyncEngine, stream: OutputStream) -> None:
        """Give the stream the outputs of the next delta; after the last one, the engine gets the request.

        Raises:
            JournaledEnd: it ended then.
        """
        await asyncio.sleep(0)  # let others run
        if self.earlier:
            outputs = msgspec.msgpack.decode(self.earlier.popleft(), type=Outputs)
            self.tokens += [token for output in outputs for token in output.tokens]
            engine.replay(stream, outputs)
        elif self._end:
            raise JournaledEnd(msgspec.msgpack.decode(self._end, type=EndedResponse))
        if not (self.earlier or self._end):
            self.waits = False
            await engine.go_on(stream, self.tokens)

    def begin(self, begun: BegunResponse) -> None:
        self._position = self.journal.append(BEGIN, self.record.id, msgspec.msgpack.encode(begun))

    def end(self, events: Sequence[bytes]) -> None:
        """It has ended, and not by an output."""
        ended = msgspec.msgpack.encode(EndedResponse(self.record.body, list(events)))
        self._position = self.journal.append(END, self.record.id, ended)

    def mark(self) -> None:
        """The events so far are visible when what made them is on disk."""
        self._marks.append((self._position, len(self.record.events or ())))
        self.synced(0 if self._position and not self.journal.why_off else 1 << 62)

    def synced(self, position: int) -> None:
        """The journal is on disk up to this position."""
        visible = self.record.num_visible
        while self._marks and self._marks[0][0] <= position:
            visible = self._marks.popleft()[1]
        if visible != self.record.num_visible:
            self.record.num_visible = visible
            self.record.wake()
