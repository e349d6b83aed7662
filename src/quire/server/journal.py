"""Journal: what the server must know of background responses to finish them after everything has died.

    <folder>/lock                      held while a server uses the folder
    <folder>/<milliseconds>.journal    records, one after the other: CRC-32, length, then [kind, id, number, data] as msgpack

Knows ids and bytes. Does not know responses (`openai/journaled_responses.py`). The event loop only puts records into memory; a
thread writes and syncs them every 50 ms. A segment is deleted when nothing in it is needed. After an error of the file
system the journal is off: responses go on without it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import msgspec

from quire.errors import ConfigError
from quire.kvstore.key_file import make_folder
from quire.logging import get_logger

log = get_logger(__name__)

BEGIN, OUTPUTS, END, FORGET = range(4)
SYNC_S = 0.05
SEGMENT_BYTES = 64 << 20
MOST_WAITING = 64 << 20
"""Bytes that wait for a slow disk; with more, the journal is off."""
SUFFIX = ".journal"
_FRAME = struct.Struct("<II")


class Record(msgspec.Struct, array_like=True, gc=False):
    """One record. `number`: of the response's records, from 0 on, so that a gap is seen."""

    kind: int
    id: str
    number: int
    data: bytes


@dataclass
class JournaledResponse:
    """The records of one response in the folder. `end`: why the response ended (cancelled, failed); empty if its last output says it."""

    begin: bytes
    outputs: list[bytes] = field(default_factory=list)
    end: bytes = b""

    @property
    def num_records(self) -> int:
        return 1 + len(self.outputs) + bool(self.end)


def framed(record: Record) -> bytes:
    data = msgspec.msgpack.encode(record)
    return _FRAME.pack(crc32(data), len(data)) + data


def records(data: bytes) -> Iterator[Record]:
    """The records of a segment, up to its end or the first that is torn or damaged."""
    at = 0
    while at + _FRAME.size <= len(data):
        checksum, length = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        payload = data[at : at + length]
        if len(payload) < length or crc32(payload) != checksum:
            return
        at += length
        try:
            yield msgspec.msgpack.decode(payload, type=Record)
        except msgspec.MsgspecError:  # of another version of Quire
            return


class Journal:
    """See above.

    Args:
        limit: bytes of all segments. With more, responses are not recorded any further: after a restart, what is not recorded
            is computed again.
        on_synced: called by the thread with the position (`append`) up to which everything is on disk.
    """

    def __init__(self, folder: Path, limit: int, on_synced: Callable[[int], None] = lambda position: None):  # fmt: skip
        self.folder, self.limit, self.on_synced = folder, limit, on_synced
        self.why_off = ""
        self.size = 0
        """Bytes of all segments, and of what is not written yet."""
        self._position = 0
        self._next: dict[str, int] = {}
        """By response: the number of its next record."""
        self._segments: dict[Path, set[str]] = {}
        """All but the last: whose records they have."""
        self._sizes: dict[Path, int] = {}
        self._ids: set[str] = set()
        """Of the segment that is written now."""
        self._waiting: list[bytes] = []
        self._changed = threading.Condition()
        self._closed = False
        self._fd = self._lock = -1
        self._path = folder
        self._thread: threading.Thread | None = None

    # -- the start --------------------------------------------------------------------------------
    def open(self) -> dict[str, JournaledResponse]:
        """Lock the folder, read it, and write what is still needed to one new segment. Returns responses by id.

        Raises:
            ConfigError: the folder cannot be used, or another server uses it.
        """
        try:
            make_folder(self.folder)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old = sorted(self.folder.glob(f"*{SUFFIX}"))
            found: dict[str, JournaledResponse] = {}
            for path in old:
                for record in records(path.read_bytes()):
                    _add(found, record)
            self._begin_segment()
            for id, response in found.items():
                self._rewrite(id, response)
            self._write_waiting()
            for path in old:
                path.unlink()
        except BlockingIOError:
            raise ConfigError(f"journal_dir {self.folder}: another server uses it; give each server a folder of its own") from None  # fmt: skip
        except OSError as why:
            raise ConfigError(f"journal_dir {self.folder}: {why.strerror or why}") from None
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()
        return found

    def _rewrite(self, id: str, response: JournaledResponse) -> None:
        parts = [(BEGIN, response.begin), *((OUTPUTS, one) for one in response.outputs)]
        for kind, data in parts + [(END, response.end)] * bool(response.end):
            self._put(kind, id, data)

    # -- records ----------------------------------------------------------------------------------
    def append(self, kind: int, id: str, data: bytes) -> int:
        """Returns the record's position. 0: it is not recorded, and nor is what follows of this response."""
        if self.why_off or self._closed or (kind != BEGIN and id not in self._next):
            return 0
        with self._changed:
            if self.size + len(data) > self.limit:
                self._next.pop(id, None)
                log.warning_every("journal limit", 600.0, "the journal has --journal-size: some background responses are not recorded")  # fmt: skip
                return 0
            if sum(map(len, self._waiting)) > MOST_WAITING:
                self._turn_off(TimeoutError("the disk is too slow"))
                return 0
            self._put(kind, id, data)
            self._changed.notify()
            return self._position

    def _put(self, kind: int, id: str, data: bytes) -> None:
        number = self._next.get(id, 0)
        self._next[id] = number + 1
        frame = framed(Record(kind, id, number, data))
        self._waiting.append(frame)
        self._position += 1
        self.size += len(frame)
        self._sizes[self._path] += len(frame)
        self._ids.add(id)

    def forget(self, id: str) -> None:
        """The response is not kept any more."""
        with self._changed:
            places = [ids for ids in (self._ids, *self._segments.values()) if id in ids]
            if not places or self.why_off or self._closed:
                return
            self._put(FORGET, id, b"")
            self._changed.notify()
            del self._next[id]
            for ids in places:
                ids.discard(id)
            self._ids.discard(id)

    # -- the thread -------------------------------------------------------------------------------
    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed and not self._waiting:
                    break
            began = time.monotonic()
            try:
                position = self._write_waiting()
                self._end_segments()
            except OSError as why:
                with self._changed:
                    self._turn_off(why)
                break
            self.on_synced(position)
            time.sleep(max(SYNC_S - (time.monotonic() - began), 0.0))
        self._close_files()

    def _write_waiting(self) -> int:
        with self._changed:
            data, position, self._waiting = b"".join(self._waiting), self._position, []
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fsync(self._fd)
        return position

    def _begin_segment(self) -> None:
        path = self.folder / f"{time.time_ns():020}-{os.getpid()}{SUFFIX}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with self._changed:
            if self._fd >= 0:
                self._segments[self._path] = self._ids
            before, self._fd, self._path, self._ids = self._fd, fd, path, set()
            self._sizes[path] = 0
        if before >= 0:
            os.close(before)

    def _end_segments(self) -> None:
        """Begin a new segment when this one is full, and delete those that nothing needs."""
        with self._changed:
            is_full = self._sizes[self._path] >= SEGMENT_BYTES and not self._waiting
            # from the oldest on: a later one may say that a response of an earlier one was forgotten
            unneeded = list(
                itertools.takewhile(lambda path: not self._segments[path], self._segments)
            )
        if is_full:
            self._begin_segment()
        for path in unneeded:
            path.unlink(missing_ok=True)
            with self._changed:
                del self._segments[path]
                self.size -= self._sizes.pop(path)

    def _turn_off(self, why: Exception) -> None:
        if not self.why_off:
            self.why_off = str(why)
            log.warning("the journal is off until the next start: %s (%s); background responses go on without it", why, self.folder)  # fmt: skip
            self._waiting.clear()
            self.on_synced(1 << 62)

    def _close_files(self) -> None:
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def close(self) -> None:
        """Write what waits, and record nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(5)


def _add(found: dict[str, JournaledResponse], record: Record) -> None:
    """Add a record that was read, in the order of writing."""
    if record.kind == BEGIN and record.number == 0:
        found[record.id] = JournaledResponse(record.data)
    elif (response := found.get(record.id)) is not None:
        if record.kind == FORGET:
            del found[record.id]
        elif (
            record.number == response.num_records and not response.end
        ):  # else records between are lost
            if record.kind == OUTPUTS:
                response.outputs.append(record.data)
            elif record.kind == END:
                response.end = record.data
