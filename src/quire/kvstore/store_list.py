"""StoreList: several stores of kept blocks, such as a folder and a server, which are asked in this order.

Knows which store has a record, and counts. Does not know how a store keeps records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from quire.kvstore.disk import Key
from quire.kvstore.record import BadRecord


class BlockStore(Protocol):
    """What has kept blocks. `kind` names it in metrics."""

    kind: str
    why_off: str
    """Why it is off for good; "": it is not."""
    num_bytes: int
    """That it uses now."""
    limit: int
    """Bytes that it may use; 0: not known."""

    @property
    def is_open(self) -> bool:
        """It can be read and written now."""
        ...

    def __contains__(self, key: Key) -> bool: ...
    def open(self) -> float:
        """Get ready. Returns the bytes per second of reads; 0: not known."""
        ...

    def refresh(self) -> None:
        """Called every few seconds."""

    def describe(self) -> str:
        """What it has, and where, for a log line."""
        ...

    def read(self, key: Key, length: int, record: memoryview) -> None:
        """Raises BadRecord."""

    def write(self, key: Key, length: int, record: memoryview) -> bool: ...
    def turn_off(self, why: Exception) -> None:
        """It is not used any more."""

    def close(self) -> None: ...


class StoreList:
    """One store or more. Loads come from the first that has a record, and saves go to all that have it not."""

    def __init__(self, stores: Sequence[BlockStore], counts: dict[str, float]):
        self.stores, self.counts = list(stores), counts
        self._lock = threading.Lock()

    @property
    def why_off(self) -> str:
        """Why all are off for good; "": one is not."""
        reasons = [one.why_off for one in self.stores]
        return "; ".join(reasons) if all(reasons) else ""

    @property
    def is_open(self) -> bool:
        return any(one.is_open for one in self.stores)

    def __contains__(self, key: Key) -> bool:
        return any(one.is_open and key in one for one in self.stores)

    def is_everywhere(self, key: Key) -> bool:
        """Every store that is open has it."""
        return all(key in one for one in self.stores if one.is_open)

    def read(self, key: Key, length: int, record: memoryview) -> str:
        """Fill `record`. Returns the kind of the store that had it. Raises BadRecord: no store has it as it should be."""
        why = BadRecord("missing")
        for one in self.stores:
            if one.is_open and key in one:
                began = time.monotonic()
                try:
                    one.read(key, length, record)
                except BadRecord as found:
                    why = found
                    self._count("kv_tier_errors", one, 1)
                else:
                    self._count("kv_load_bytes", one, length)
                    return one.kind
                finally:
                    self._count("kv_load_time", one, time.monotonic() - began)
        raise why

    def write(self, key: Key, length: int, record: memoryview) -> None:
        """Write it to all stores that lack it and have room."""
        for one in self.stores:
            began = time.monotonic()
            if one.write(key, length, record):
                self._count("kv_store_bytes", one, length)
            self._count("kv_store_time", one, time.monotonic() - began)

    def _count(self, name: str, store: BlockStore, number: float) -> None:
        key = f"{name}:{store.kind}"
        with self._lock:
            self.counts[key] = self.counts.get(key, 0.0) + number

    def turn_off(self, why: Exception) -> None:
        for one in self.stores:
            one.turn_off(why)

    def close(self) -> None:
        for one in self.stores:
            one.close()
