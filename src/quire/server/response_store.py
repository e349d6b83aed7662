"""Responses that the server keeps: for GET, for the next turn (`previous_response_id`), and while no client listens (`background`).

    POST, background ──> a task ──events──> StoredResponse ──> clients: GET ?stream=true&starting_after=N, as often as they like

Knows ids, owners, bytes and time. Does not know what an event says. Everything is in memory, within a limit of bytes and of time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.server.errors import ApiError, invalid
from quire.server.sse import EventEncoder
from quire.server.wakeup import Wakeup

MAX_RUNNING = 256
"""Background responses that run at once."""
EVENTS_AT_ONCE = 512
"""Events that one message to a client has, so that a long response does not hold the loop."""
OVERHEAD, ITEM_OVERHEAD = 1024, 400
"""Bytes that a response, and each item of its conversation, takes besides its text, estimated."""


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response.

    Attributes:
        owner: of the key that asked for it; other keys do not find it.
        describe: makes the object of a response that still runs.
        items: the conversation so far, with its own output.
        events: the frames of its stream, each at the place of its sequence number; None: they are not kept.
        body: the object, encoded, when it has ended.
        task: what runs it; None: a client waits for it.
    """

    id: str
    owner: str
    describe: Callable[[], bytes]
    items: list[dict[str, Any]] = field(default_factory=list)
    events: list[bytes] | None = None
    body: bytes = b""
    task: asyncio.Task[None] | None = None
    size: int = OVERHEAD
    ended_at: float = 0.0
    waiting: set[Wakeup] = field(default_factory=set)
    """Of the clients that follow its events."""
    num_visible: int | None = None
    """Events that clients may have now: what made the others is not on disk yet. None: all."""
    on_forgotten: Callable[[], None] = lambda: None

    @property
    def ended(self) -> bool:
        return bool(self.body)

    @property
    def num_events(self) -> int:
        """How many events clients may have."""
        count = len(self.events or ())
        return count if self.num_visible is None else min(count, self.num_visible)

    def object(self) -> bytes:
        return self.body or self.describe()

    def wake(self) -> None:
        for one in self.waiting:
            one.set()


class ResponseStore:
    """All of one HTTP process, oldest first.

    Args:
        limit: bytes in all; the oldest that have ended are forgotten first.
        seconds: after its end, a response is forgotten.
    """

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.limit, self.seconds, self.clock, self.size = limit, seconds, clock, 0
        self._found: dict[tuple[str, str], StoredResponse] = {}

    def add(self, record: StoredResponse) -> None:
        """Raises ApiError: 400: this owner has a running response with this id; 429: too many run."""
        key = record.owner, record.id
        before = self._found.get(key)
        if before is not None and not before.ended:
            raise invalid(f"a response `{record.id[:200]}` is running; choose another id", "request_id")  # fmt: skip
        if record.task is None and not record.ended and self.running >= MAX_RUNNING:
            raise ApiError(429, f"{MAX_RUNNING} background responses are running; try again later")
        if before is not None:
            self._forget(before)
        self._found[key] = record
        self.size += record.size
        self._make_room()

    @property
    def running(self) -> int:
        return sum(not one.ended for one in self._found.values())

    def get(self, owner: str, id: str) -> StoredResponse:
        """Raises ApiError: 404: there is none, or not for this owner."""
        record = self._found.get((owner, id))
        if record is not None and self._is_old(record):
            self._forget(record)
            record = None
        if record is None:
            raise ApiError(404, f"there is no response `{id[:200]}`: it was not stored, or is not kept any more", param="response_id")  # fmt: skip
        return record

    def _is_old(self, record: StoredResponse) -> bool:
        return record.ended and self.clock() - record.ended_at > self.seconds

    def append(self, record: StoredResponse, event: bytes) -> None:
        """An event of a response that runs."""
        if record.events is not None:
            record.events.append(event)
            self._grow(record, len(event) + 64)
        record.wake()

    def end(self, record: StoredResponse, body: bytes, output: Sequence[dict[str, Any]]) -> None:
        """It has ended; `body`: its object. `output`: its items."""
        record.body, record.ended_at = body, self.clock()
        record.items += output
        self._grow(record, 2 * len(body))
        record.wake()

    def _grow(self, record: StoredResponse, size: int) -> None:
        if self._found.get((record.owner, record.id)) is record:
            record.size += size
            self.size += size
            self._make_room()

    def _make_room(self) -> None:
        """Forget what is too old, then the oldest; then the events of the longest that still runs."""
        for record in list(self._found.values()):
            if self.size > self.limit or self._is_old(record):
                if record.ended:
                    self._forget(record)
            else:
                break
        while self.size > self.limit:
            longest = max(self._found.values(), key=lambda one: len(one.events or ()))
            if not longest.events:
                return  # what is left are responses without events: MAX_RUNNING bounds them
            freed = sum(len(event) + 64 for event in longest.events)
            longest.events = None
            longest.size -= freed
            self.size -= freed
            longest.wake()

    def _forget(self, record: StoredResponse) -> None:
        del self._found[record.owner, record.id]
        self.size -= record.size
        record.on_forgotten()

    def delete(self, owner: str, id: str) -> StoredResponse:
        """Remove a stored response; if its generation still runs, cancel that. Raises: as `get`."""
        record = self.get(owner, id)
        self._forget(record)
        record.events = None
        if record.task is not None:
            record.task.cancel()
        record.wake()
        return record


class StoredEvents:
    """The events of a response after one of them, as they come: an `EventSource`."""

    def __init__(self, record: StoredResponse, after: int = -1):
        self.record, self.place, self.ended = record, after + 1, False
        self._wakeup = Wakeup()

    async def open(self) -> None:
        self.record.waiting.add(self._wakeup)

    async def next(self) -> list[bytes]:
        """Raises ApiError: 410: they are not kept any more."""
        record = self.record
        while (
            record.events is not None and self.place >= record.num_events and not self._is_whole()
        ):
            await self._wakeup.wait()
        if record.events is None:
            raise ApiError(410, "the events of this response are not kept any more; GET it without `stream`")  # fmt: skip
        end = min(self.place + EVENTS_AT_ONCE, record.num_events)
        found = record.events[self.place : end]
        self.place += len(found)
        self.ended = self._is_whole() and self.place >= len(record.events)
        return found

    def _is_whole(self) -> bool:
        """Clients may have all of its events."""
        record = self.record
        return record.ended and record.num_events == len(record.events or ())

    def close(self) -> None:
        self.record.waiting.discard(self._wakeup)


class EventsAsTheyAre(EventEncoder[bytes]):
    """Sends stored events."""

    def add(self, item: bytes, /) -> Iterable[bytes]:
        return (item,)

    def end(self) -> Iterable[bytes]:
        return ()
