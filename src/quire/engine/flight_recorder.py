"""The flight recorder: the last plans and results of an engine, on disk, where they survive a crash.

Knows the worker protocol and files. Does not know models. A recording can be run on a worker again (`cli/replay.py`), because every segment starts with the content
of each occupied row: a worker that computes those rows anew has the same state as the recorded one.

    FOLDER/flight-0, flight-1    segments of `SEGMENT` plans; when one is full, the older one is overwritten
    a segment                    frames of (length: 4 bytes, msgpack): RowsAtStart, then StepPlan and StepResult; a
                                 length of 0, or the end of the file, ends it

The files are memory-mapped, so writing a frame copies it into the page cache: a killed process loses no written frame.
If a recording cannot be written, its files are deleted, and the engine goes on without it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from quire.engine.poison_requests import short_form
from quire.logging import get_logger
from quire.protocol.plan import EnteredRow, StepPlan, StepResult

log = get_logger(__name__)

SEGMENT = 64
ROOM = 1 << 18  # initial size of a file in bytes
MOST_ROOM = 1 << 26  # largest size of a file in bytes; a recording has two files
LENGTH = struct.Struct("<I")
TENSORS, NONE = "tensors", msgspec.msgpack.encode([])
"""In the extras of a recorded result: the work items that had a tensor."""


class RowsAtStart(Struct, array_like=True, tag="rows"):
    """The rows at the start of a segment, each as if it entered now. For each, `done` tokens were computed."""

    rows: list[EnteredRow]
    done: list[int]
    steps: int  # number of steps before this segment


Frame = RowsAtStart | StepPlan | StepResult


class Recording(Struct):
    """A recording as read from disk: its start state, and the frames after it."""

    start: RowsAtStart
    frames: list[StepPlan | StepResult]

    def unfinished(self) -> set[str]:
        """Ids of the requests in plans without a result."""
        results = {f.step for f in self.frames if isinstance(f, StepResult)}
        ids = {row.row: row.id for row in self.start.rows}
        stuck: set[str] = set()
        for frame in self.frames:
            if isinstance(frame, StepPlan):
                ids |= {new.row: new.id for new in frame.entered}
                if frame.step not in results:
                    stuck |= {ids[item.row] for item in frame.work if item.row in ids}
        return stuck

    def running(self) -> list[EnteredRow]:
        """The requests that have a row at the end."""
        rows = {row.row: row for row in self.start.rows}
        for frame in self.frames:
            if isinstance(frame, StepPlan):
                for row in frame.freed_rows:
                    rows.pop(row, None)
                rows |= {new.row: new for new in frame.entered}
        return list(rows.values())

    def lengths(self) -> dict[str, int]:
        """By id, the tokens of each request that had a row at any time, with those that its frontend may not have received.
        An output without tokens counts as one."""
        rows = {row.row: row.id for row in self.start.rows}
        found = {row.id: len(row.tokens) for row in self.start.rows}
        drawing: dict[int, list[str]] = {}  # by step, the request of each work item
        for frame in self.frames:
            if isinstance(frame, StepPlan):
                rows |= {new.row: new.id for new in frame.entered}
                found |= {new.id: len(new.tokens) for new in frame.entered}
                drawing[frame.step] = [rows.get(item.row, "") for item in frame.work]
                continue
            ids = drawing.pop(frame.step, [])
            others = {*frame.errors, *msgspec.msgpack.decode(frame.extras.get(TENSORS, NONE), type=list[int])}  # fmt: skip
            for index, (id, tokens) in enumerate(zip(ids, frame.tokens, strict=False)):
                if id in found and (tokens or index in others):
                    added = frame.added_tokens.get(index, ())
                    found[id] += len(tokens) + len(added) or 1
        return found

    def rows(self) -> list[EnteredRow]:
        """The rows of all requests, at any time."""
        plans = (frame for frame in self.frames if isinstance(frame, StepPlan))
        return [*self.start.rows, *(new for plan in plans for new in plan.entered)]

    def adapters(self) -> set[str]:
        """The versions of the adapters that requests have."""
        return {row.adapter for row in self.rows() if row.adapter is not None}

    def with_media(self) -> set[str]:
        """Ids of the requests with media, whose bytes are not recorded."""
        return {row.id for row in self.rows() if row.media}

    def seen(self) -> set[str]:
        """Ids of all requests that had a row at any time."""
        return {row.id for row in self.rows()}


class RecordingSegment:
    """A memory-mapped file: a write() would cost more than a small step's plan and result together.

    Its space is allocated in advance: if the disk is full, touching an unallocated page would kill the process.

    Raises:
        OSError: the disk is full.
    """

    def __init__(self, path: Path):
        self._file = path.open("w+b", buffering=0)
        self._map: mmap.mmap | None = None
        self._end = 0
        try:
            self._grow(ROOM)
        except BaseException:
            self._file.close()
            raise

    def _grow(self, room: int) -> mmap.mmap:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), 0, room)
        else:
            self._file.truncate(room)
        if self._map is not None:
            self._map.close()
        self._map = mmap.mmap(self._file.fileno(), room)
        return self._map

    def restart(self) -> None:
        """Invalidate all frames."""
        if self._map is not None:
            LENGTH.pack_into(self._map, 0, 0)
            self._map[: self._end] = bytes(self._end)
        self._end = 0

    def has_room(self, size: int) -> bool:
        """Whether a frame of `size` bytes fits below the limit of a file."""
        return self._end + 2 * LENGTH.size + size <= MOST_ROOM

    def append(self, data: bytes) -> None:
        end = self._end + LENGTH.size + len(data)
        room = self._map
        if room is None or end + LENGTH.size > len(room):
            room = self._grow(min(2 * end, MOST_ROOM))
        room[self._end + LENGTH.size : end] = data
        # last, so that a partly written frame has no length
        LENGTH.pack_into(room, self._end, len(data))
        self._end = end

    def close(self) -> None:
        """Truncate the file to its frames and close it."""
        if self._map is not None:
            self._map.close()
            self._map = None
            self._file.truncate(self._end)
        self._file.close()


class FlightRecorder:
    """A StepObserver that writes frames, and tracks the rows that a new segment must start with.

    Args:
        stopped: called if the recording cannot go on.
    """

    def __init__(self, folder: Path, stopped: Callable[[], None] = lambda: None):
        self.folder, self._stopped = folder, stopped
        self._encoder = msgspec.msgpack.Encoder()
        self._rows: dict[int, EnteredRow] = {}
        self._done: dict[int, int] = {}
        # for each step in flight and each work item, the row that draws
        self._work: dict[int, list[EnteredRow | None]] = {}
        self._plans = self._pages = 0
        self._segments: dict[int, RecordingSegment] = {}
        self._segment: RecordingSegment | None = None
        with suppress(OSError):  # the first plan tries again
            self._turn_page()  # from now on the recording says that nothing has run

    def launched(self, plan: StepPlan) -> None:
        with self._discarded_on_failure():
            self._plan(plan)

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        if isinstance(result, BaseException):
            self._work.pop(step, None)  # it has no result
            return
        with self._discarded_on_failure():
            self._result(result)

    @contextmanager
    def _discarded_on_failure(self) -> Iterator[None]:
        """A recording without its end would mislead."""
        try:
            yield
        except Exception:
            self.discard()
            self._stopped()
            raise

    def _plan(self, plan: StepPlan) -> None:
        if self._plans % SEGMENT == 0 and (self._plans or self._segment is None):
            self._turn_page()
        entered = [_short(new) for new in plan.entered]
        self._write(msgspec.structs.replace(plan, entered=entered) if entered else plan)
        self._plans += 1
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        for new in entered:
            # A copy: tokens and blocks grow here as they do on the worker.
            self._rows[new.row] = msgspec.structs.replace(
                new, tokens=list(new.tokens), blocks=[list(column) for column in new.blocks]
            )
            self._done[new.row] = new.num_computed_tokens
        for item in plan.work:
            self._done[item.row] += item.num_tokens - item.drafts
            if item.new_blocks:
                for column, added in zip(self._rows[item.row].blocks, item.new_blocks, strict=True):
                    column.extend(added)
        self._work[plan.step] = [
            self._rows[item.row] if item.samples else None for item in plan.work
        ]

    def _result(self, result: StepResult) -> None:
        self._write(_without_tensors(result) if result.tensors else result)
        work = self._work.pop(result.step)
        for request, tokens in zip(work, result.tokens, strict=True):
            if request is not None and tokens:
                request.tokens += tokens
                # otherwise the row has another request by now
                if len(tokens) > 1 and self._rows.get(request.row) is request:
                    self._done[request.row] += len(tokens) - 1
        for index, tokens in result.added_tokens.items():
            if (request := work[index]) is not None and result.tokens[index]:
                request.tokens += tokens

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._segment = None

    def discard(self) -> None:
        """Delete the files."""
        with suppress(OSError, ValueError):
            for segment in self._segments.values():
                segment.restart()
        for path in self.folder.glob("flight-*"):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError, ValueError):
            self.close()

    def _turn_page(self) -> None:
        number = self._pages % 2
        self._pages += 1
        if (segment := self._segments.get(number)) is None:
            segment = self._segments[number] = RecordingSegment(self.folder / f"flight-{number}")
        else:
            segment.restart()
        self._segment = segment
        rows = [msgspec.structs.replace(row, num_computed_tokens=0) for row in self._rows.values()]
        done = [self._done[row.row] for row in rows]
        self._write(RowsAtStart(rows, done, self._plans))

    def _write(self, frame: Frame) -> None:
        data = self._encoder.encode(frame)
        if self._segment is not None and not self._segment.has_room(len(data)):
            if isinstance(frame, RowsAtStart):
                raise OSError(f"the state of the running requests is larger than {MOST_ROOM} bytes")
            self._turn_page()
        if self._segment is not None:
            if not self._segment.has_room(len(data)):
                raise OSError(f"a step is larger than {MOST_ROOM} bytes")
            self._segment.append(data)


def _short(new: EnteredRow) -> EnteredRow:
    """With its parameters encoded once, in their short form, because each segment repeats the parameters of all occupied rows;
    and without the bytes of its media."""
    return msgspec.structs.replace(
        new,
        params=msgspec.Raw(msgspec.msgpack.encode(short_form(new.params))),
        media=[msgspec.structs.replace(item, data=b"") for item in new.media],
    )


def _without_tensors(result: StepResult) -> StepResult:
    """With the indices of its tensors."""
    extras = result.extras | {TENSORS: msgspec.msgpack.encode(list(result.tensors))}
    return msgspec.structs.replace(result, tensors={}, extras=extras)


def frames(path: Path) -> Iterator[Frame]:
    """Frames of a segment, up to its end or to the first incomplete one."""
    decoder = msgspec.msgpack.Decoder(Frame)
    data = path.read_bytes()
    offset = 0
    while offset + 4 <= len(data):
        (length,) = LENGTH.unpack_from(data, offset)
        if not length or offset + 4 + length > len(data):
            return
        yield decoder.decode(data[offset + 4 : offset + 4 + length])
        offset += 4 + length


def read_recording(folder: Path) -> Recording | None:
    """The last one or two segments as one recording; None if nothing was recorded.

    Raises:
        ValueError: a file is not a flight recording.
    """
    segments: list[tuple[RowsAtStart, list[StepPlan | StepResult]]] = []
    for path in sorted(folder.glob("flight-*")):
        try:
            segment_frames = list(frames(path))
        except (ValueError, msgspec.DecodeError) as why:
            raise ValueError(f"{path} is not a flight recording: {why}") from None
        if not segment_frames:
            continue  # just started
        first, *rest = segment_frames
        if not isinstance(first, RowsAtStart):
            raise ValueError(
                f"{path} is not a flight recording: it does not start with the running requests"
            )
        segments.append((first, [f for f in rest if not isinstance(f, RowsAtStart)]))
    if not segments:
        return None
    segments.sort(key=lambda segment: segment[0].steps)
    return Recording(segments[0][0], [frame for _, part in segments for frame in part])
