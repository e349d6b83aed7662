"""Transfers: threads that move records between a store and the slots of the staging memory.

Knows keys, slots and a store. Does not know requests, blocks or steps. The engine's thread starts reads and writes, and looks
what has arrived; the threads wake it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from quire.kvstore.disk import Key
from quire.kvstore.record import BadRecord
from quire.kvstore.staging import Staging
from quire.kvstore.store_list import StoreList
from quire.logging import get_logger

log = get_logger(__name__)

NUM_READERS = 4
NICENESS = 5
FLUSH_S = 5.0
"""How long the end of an engine waits for records that are being written."""


@dataclass(eq=False)
class BlockRead:
    """Some records that are being read, in the order of `keys`.

    Attributes:
        arrived: (place in `keys`, slot) of those that are there and right, until somebody takes them.
        num_arrived: how many were ever there.
        first_bad: the first place whose record is missing or wrong; len(keys): none.
        reason: why it is.
        kinds: of the stores that had the records, by place in `keys`.
    """

    keys: Sequence[tuple[Key, int]]
    first_bad: int
    began: float
    arrived: deque[tuple[int, int]] = field(default_factory=deque)
    num_arrived: int = 0
    reason: str = ""
    kinds: dict[int, str] = field(default_factory=dict)
    is_cancelled: bool = False

    @property
    def is_complete(self) -> bool:
        return self.num_arrived == len(self.keys)


class Transfers:
    """See above.

    Args:
        wake: called by the threads when something has arrived.
    """

    def __init__(self, store: StoreList, staging: Staging, wake: Callable[[], None]):
        self.store, self.staging, self._wake = store, staging, wake
        self.read_rate = 0.0
        """Bytes per second of complete reads; 0: not measured."""
        self._begun_writes = self._ended_writes = 0  # each is changed by one thread
        self._reads: SimpleQueue[tuple[BlockRead, int] | None] = SimpleQueue()
        self._writes: SimpleQueue[tuple[Key, int, int] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = [
            *(self._start(self._read_all, f"kv-read-{n}") for n in range(NUM_READERS)),
            self._start(self._write_all, "kv-write"),
        ]

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=_with_low_priority, args=(work,), name=name, daemon=True)
        thread.start()
        return thread

    # -- reads ------------------------------------------------------------------------------------
    def read(self, keys: Sequence[tuple[Key, int]]) -> BlockRead:
        """Begin to read these records: of each the key and the bytes of the block."""
        read = BlockRead(keys, len(keys), time.monotonic())
        for place in range(len(keys)):
            self._reads.put((read, place))
        return read

    def cancel(self, read: BlockRead) -> None:
        """Give back what has arrived and nobody took; the rest is given back when it arrives."""
        with self._lock:
            read.is_cancelled = True
            slots = [slot for _, slot in read.arrived]
            read.arrived.clear()
        for slot in slots:
            self.staging.give_back(slot)

    def _read_all(self) -> None:
        while (job := self._reads.get()) is not None:
            read, place = job
            if read.is_cancelled or place > read.first_bad:
                continue
            if (slot := self.staging.wait()) is None:
                return
            self._read_one(read, place, slot)
            self._wake()

    def _read_one(self, read: BlockRead, place: int, slot: int) -> None:
        key, length = read.keys[place]
        reason, kind = "" if not read.is_cancelled else "cancelled", ""
        if not reason:
            try:
                kind = self.store.read(key, length, self.staging.slot(slot))
            except BadRecord as why:
                reason = str(why)
            except Exception:  # this thread must go on
                log.exception("a read of a kept block failed")
                reason = "error"
        with self._lock:
            if kind:
                read.kinds[place] = kind
            if keeps := not (reason or read.is_cancelled):
                read.arrived.append((place, slot))
                read.num_arrived += 1
            elif reason and place < read.first_bad:
                read.first_bad, read.reason = place, reason
        if not keeps:
            self.staging.give_back(slot)
        elif read.is_complete:
            self._measure(sum(length for _, length in read.keys), time.monotonic() - read.began)

    def _measure(self, num_bytes: int, seconds: float) -> None:
        rate = num_bytes / max(seconds, 1e-4)
        self.read_rate = 0.7 * self.read_rate + 0.3 * rate if self.read_rate else rate

    # -- writes -----------------------------------------------------------------------------------
    @property
    def num_writing(self) -> int:
        return self._begun_writes - self._ended_writes

    def write(self, key: Key, length: int, slot: int) -> None:
        """Write the block in this slot, and give the slot back."""
        self._begun_writes += 1
        self._writes.put((key, length, slot))

    def _write_all(self) -> None:
        while (job := self._writes.get()) is not None:
            key, length, slot = job
            try:
                self.store.write(key, length, self.staging.slot(slot))
            except Exception as why:
                log.exception("a write of a kept block failed")
                self.store.turn_off(why)
            self.staging.give_back(slot)
            self._ended_writes += 1
            self._wake()

    # -- the end ----------------------------------------------------------------------------------
    def close(self) -> None:
        """End the threads, after what is being written has been written or FLUSH_S have passed."""
        self._writes.put(None)
        self._threads[-1].join(FLUSH_S)
        for _ in range(NUM_READERS):
            self._reads.put(None)
        self.staging.close()
        self.store.close()


def _with_low_priority(work: Callable[[], None]) -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    work()
