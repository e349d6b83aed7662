"""Segments: the files of a folder of kept blocks, over all identities, and the limits of their bytes.

    <folder>/key                          the key of block names (key_file.py)
    <folder>/<identity>/identity.json     what the identity stands for, for people
    <folder>/<identity>/<time>-<id>.seg   records, one after the other (record.py), written by one engine

A writer holds a lock on its segment. So several engines may use a folder: each writes segments of its own, reads all of its
identity, and deletes the least recently used ones that nobody writes. A time of last use is the file's mtime.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.kvstore.key_file import make_folder
from quire.kvstore.record import PAGE, BadRecord, RecordHead, read_head

SUFFIX = ".seg"
DESCRIPTION = "identity.json"
RATE = "prompt-tokens-per-second"
"""A file beside the segments, with what the last engine measured."""
SEGMENT_BYTES = 256 << 20
FEWEST_SEGMENTS = 16
KEEP_FREE = 1 << 30
KEEP_FREE_SHARE = 0.05
_O_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A file as the folder has it."""

    path: Path
    num_bytes: int
    used: float
    """Seconds since 1970."""

    @property
    def made(self) -> float:
        """When it was begun, from its name."""
        digits = self.path.name.partition("-")[0]
        return int(digits) / 1000 if digits.isdigit() else 0.0


def open_file(path: Path, flags: int) -> int:
    """A descriptor past the page cache where the file system can do that: kept blocks shall not push out weights.

    Raises OSError.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | _O_DIRECT, 0o600)
    except OSError as why:
        if not _O_DIRECT or why.errno != 22:  # EINVAL: not on this file system
            raise
        return os.open(path, flags, 0o600)


def segments_in(folder: Path) -> list[SegmentFile]:
    """Of one identity, the least recently used first. Raises OSError."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # another engine has deleted it
                    about = entry.stat()
                    found.append(SegmentFile(Path(entry.path), about.st_size, about.st_mtime))
    return sorted(found, key=lambda one: (one.used, one.path))


def identities(root: Path) -> list[Path]:
    """The folders of all identities. Raises OSError."""
    return sorted(path for path in root.iterdir() if (path / DESCRIPTION).is_file())


def describe(folder: Path, facts: Mapping[str, str]) -> None:
    """Make the folder of an identity, and say what it stands for. Raises OSError."""
    make_folder(folder)
    draft = folder / f".{DESCRIPTION}.{secrets.token_hex(8)}"
    draft.write_text(json.dumps(dict(facts), indent=1))
    draft.replace(folder / DESCRIPTION)


def heads(path: Path, identity: bytes, start: int = 0) -> Iterator[tuple[int, RecordHead]]:
    """(offset, header) of each record of a segment from `start` on, up to its end or the first that is torn. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        offset, end = start, os.fstat(fd).st_size
        while offset + PAGE <= end:
            try:
                head = read_head(os.pread(fd, PAGE, offset), identity)
            except BadRecord:
                return
            if offset + head.size > end:
                return
            yield offset, head
            offset += head.size
    finally:
        os.close(fd)


class SegmentWriter:
    """A new segment, locked while it is open. Raises OSError."""

    def __init__(self, folder: Path):
        name = f"{time.time_ns() // 1_000_000:015}-{secrets.token_hex(6)}{SUFFIX}"
        self.path, self.end = folder / name, 0
        self._fd = open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def append(self, record: memoryview) -> int:
        """Returns the record's offset. Raises OSError: it is not, or not wholly, in the file."""
        offset = self.end
        written = os.pwrite(self._fd, record, offset)
        while written < len(record):
            more = os.pwrite(self._fd, record[written:], offset + written)
            if not more:
                raise OSError(28, os.strerror(28))  # ENOSPC
            written += more
        self.end += written
        return offset

    def close(self) -> None:
        os.close(self._fd)


def make_room(root: Path, limit: int, segment_bytes: int) -> bool:
    """Delete the least recently used segments until one more fits in the limit and leaves the file system some room.

    False: the file system has too little room even so. Raises OSError.
    """
    segments = [one for folder in identities(root) for one in segments_in(folder)]
    segments.sort(key=lambda one: one.used)
    used = sum(one.num_bytes for one in segments)
    for one in segments:
        if used + segment_bytes <= limit and has_free_room(root, segment_bytes):
            return True
        if remove(one.path):
            used -= one.num_bytes
    return has_free_room(root, segment_bytes)


def has_free_room(root: Path, num_bytes: int) -> bool:
    room = shutil.disk_usage(root)
    return room.free - num_bytes >= min(KEEP_FREE, int(room.total * KEEP_FREE_SHARE))


def remove(path: Path) -> bool:
    """Delete a segment, unless an engine is writing it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
