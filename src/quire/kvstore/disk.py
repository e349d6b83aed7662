"""DiskStore: kept blocks of one identity in the segments of a folder.

Knows names, groups and bytes. Does not know requests, blocks in use, or which blocks are worth keeping. `open` and `refresh`
fill the index from the headers of the records; a record is trusted only when `read` has checked all of it. Several threads may
read; one writes. After an error of the file system the store is off: it has nothing and takes nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.kvstore.key_file import make_folder
from quire.kvstore.record import BadRecord, check_record, record_size, write_head
from quire.kvstore.segments import (
    FEWEST_SEGMENTS,
    SEGMENT_BYTES,
    SegmentWriter,
    describe,
    heads,
    identities,
    make_room,
    open_file,
    segments_in,
)
from quire.logging import get_logger

log = get_logger(__name__)

Key = tuple[int, bytes]
"""KV group, name."""
Identify = Callable[[], tuple[bytes, dict[str, str]]]
"""Returns an identity, and what it stands for. May read all weights."""
DAY_S = 86_400.0
TOUCH_S = 60.0
REFRESH_S = 5.0
PROBE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where a record is."""

    path: Path
    offset: int
    length: int


class DiskStore:
    """See above.

    Args:
        root: the folder of all identities.
        identify: returns the identity that the records must belong to, and what it stands for. `open` calls it.
        limit: bytes of all segments, over all identities.
        key: of the MACs of records; empty: they have none, because the key of names is in the folder, too.
    """

    kind = "disk"

    def __init__(self, root: Path, identify: Identify, limit: int, key: bytes = b""):
        self.root, self.limit, self._identify, self._key = root, limit, identify, key
        self.identity, self.folder = b"", root
        self.segment_bytes = min(SEGMENT_BYTES, limit // FEWEST_SEGMENTS)
        self.index: dict[Key, RecordPlace] = {}
        self._is_ready = False
        self.why_off = ""
        self.bytes_written = self.bytes_read = 0
        self._begun: deque[tuple[float, int]] = deque()
        """Segments of the last 24 hours: when they were begun, and bytes."""
        self._writer: SegmentWriter | None = None
        self._ends: dict[Path, int] = {}
        """How much of each segment is in the index."""
        self._touched: dict[Path, float] = {}
        self._lock = threading.Lock()
        self.num_refreshes = self.num_bytes = 0

    # -- the index --------------------------------------------------------------------------------
    @property
    def is_open(self) -> bool:
        return self._is_ready and not self.why_off

    def __contains__(self, key: Key) -> bool:
        return key in self.index

    def open(self) -> float:
        """Make the folder, test it, read the index. Returns the bytes per second of reads; 0: the store is off."""
        try:
            make_folder(self.root)
            self.identity, facts = self._identify()
            self.folder = self.root / self.identity.hex()
            describe(self.folder, facts)
            rate = self._probe()
            found = (one for folder in identities(self.root) for one in segments_in(folder))
            self._begun.extend(sorted((one.made, one.num_bytes) for one in found))
            self._is_ready = True  # what is found so far can be read
            self.refresh()
            return rate
        except OSError as why:
            self.turn_off(why)
            return 0.0

    def refresh(self) -> None:
        """Index what other engines have written since, and forget what they have deleted."""
        try:
            found = {one.path: one.num_bytes for one in segments_in(self.folder)}
            self.num_bytes = sum(found.values()) + self._bytes_of_others()
            for path, num_bytes in found.items():
                writes = self._writer is not None and path == self._writer.path
                if not (self.why_off or writes) and self._ends.get(path, 0) < num_bytes:
                    self._scan(path)
            if gone := self._ends.keys() - found.keys():
                for key, place in list(self.index.items()):
                    if place.path in gone:
                        self.index.pop(key, None)
                for path in gone:
                    del self._ends[path]
            self.num_refreshes += 1
        except OSError as why:
            self.turn_off(why)

    def _bytes_of_others(self) -> int:
        """Of the segments of other identities."""
        num_bytes = 0
        for folder in identities(self.root):
            with suppress(FileNotFoundError):  # it is being deleted
                if folder != self.folder:
                    num_bytes += sum(one.num_bytes for one in segments_in(folder))
        return num_bytes

    def _scan(self, path: Path) -> None:
        end = self._ends.get(path, 0)
        with suppress(FileNotFoundError):  # another engine has deleted it
            for offset, head in heads(path, self.identity, end):
                place = RecordPlace(path, offset, head.length)
                self.index.setdefault((head.group, head.name), place)
                self._ends[path] = offset + head.size

    def describe(self) -> str:
        return f"{len(self.index)} in {self.folder}"

    @property
    def written_today(self) -> int:
        """Bytes of all segments that were begun within the last 24 hours."""
        since = time.time() - DAY_S
        while self._begun and self._begun[0][0] < since:
            self._begun.popleft()
        return sum(num_bytes for _, num_bytes in list(self._begun))

    def _probe(self) -> float:
        """Bytes per second of reads, measured on a file of its own."""
        path = self.folder / f".probe-{os.getpid()}-{id(self)}"
        page = memoryview(mmap.mmap(-1, PROBE_BYTES))
        fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            page[:] = os.urandom(4096) * (PROBE_BYTES // 4096)
            os.pwrite(fd, page, 0)
            began = time.perf_counter()
            size = os.preadv(fd, [page], 0)
            return size / max(time.perf_counter() - began, 1e-6)
        finally:
            os.close(fd)
            path.unlink()

    # -- records ----------------------------------------------------------------------------------
    def read(self, key: Key, length: int, record: memoryview) -> None:
        """Fill `record` with the checked record of a block of `length` bytes.

        Raises:
            BadRecord: it is not there, or not right; it is no longer in the index.
        """
        place = self.index.get(key)
        try:
            if place is None or self.why_off:
                raise BadRecord("missing")
            part = record[: record_size(length)]
            self._read_into(part, place)
            check_record(part, self.identity, key[1], key[0], length, self._key)
            self.bytes_read += len(part)
            self._touch(place.path)
        except BadRecord:
            self.index.pop(key, None)
            raise

    def _read_into(self, part: memoryview, place: RecordPlace) -> None:
        try:
            fd = open_file(place.path, os.O_RDONLY)
            try:
                if os.preadv(fd, [part], place.offset) < len(part):
                    raise BadRecord("short")
            finally:
                os.close(fd)
        except FileNotFoundError:
            if not self.folder.is_dir():
                self.turn_off(FileNotFoundError(errno.ENOENT, "the folder is gone"))
            raise BadRecord("missing") from None
        except OSError as why:
            self.turn_off(why)
            raise BadRecord("io") from None

    def _touch(self, path: Path) -> None:
        now = time.time()
        if now - self._touched.get(path, 0.0) > TOUCH_S:
            self._touched[path] = now
            with suppress(OSError):
                os.utime(path)

    def write(self, key: Key, length: int, record: memoryview) -> bool:
        """Append a record whose bytes are in place. False: there is no room, or the store is off."""
        if self.why_off or key in self.index:
            return False
        part = record[: record_size(length)]
        write_head(part, self.identity, key[1], key[0], length, self._key)
        try:
            if (writer := self._segment(len(part))) is None:
                return False
            offset = writer.append(part)
        except OSError as why:
            self.turn_off(why)
            return False
        self.bytes_written += len(part)
        begun, num_bytes = self._begun[-1]
        self._begun[-1] = begun, num_bytes + len(part)
        self.index[key] = RecordPlace(writer.path, offset, length)
        return True

    def _segment(self, num_bytes: int) -> SegmentWriter | None:
        """The segment to write the next record to; None: there is no room for one."""
        writer = self._writer
        if writer is not None and writer.end + num_bytes <= self.segment_bytes:
            return writer
        self._close_writer()
        if num_bytes > self.segment_bytes or not make_room(
            self.root, self.limit, self.segment_bytes
        ):
            log.warning_every(
                "kv disk room", 600.0, "the file system of %s has too little room: no KV blocks are written there now",
                self.root,
            )  # fmt: skip
            return None
        self._writer = SegmentWriter(self.folder)
        self._begun.append((time.time(), 0))
        return self._writer

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._ends[self._writer.path] = self._writer.end
            self._writer = None

    # -- the end ----------------------------------------------------------------------------------
    def turn_off(self, why: Exception) -> None:
        """The store is not used any more; requests are computed as without it."""
        with self._lock:
            if self.why_off:
                return
            self.why_off = str(why)
        log.warning("kept KV blocks are off until the next start: %s (%s)", why, self.folder)
        self.index = {}

    def close(self) -> None:
        with suppress(OSError):
            self._close_writer()
