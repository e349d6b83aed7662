"""StoreList: several stores of kept blocks, such as a folder and a server, which are asked in this order.

Knows which store has a record. Does not know how a store keeps records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.kvstore.disk import Key
from quire.kvstore.record import BadRecord


class BlockStore(Protocol):
    """What has kept blocks. `kind` names it in metrics."""

    kind: str
    why_off: str
    """Why it is off for good; "": it is not."""

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

    def __init__(self, stores: Sequence[BlockStore]):
        self.stores = list(stores)

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
                try:
                    one.read(key, length, record)
                except BadRecord as found:
                    why = found
                else:
                    return one.kind
        raise why

    def write(self, key: Key, length: int, record: memoryview) -> list[str]:
        """Returns the kinds of the stores that have taken it."""
        return [one.kind for one in self.stores if one.write(key, length, record)]

    def turn_off(self, why: Exception) -> None:
        for one in self.stores:
            one.turn_off(why)

    def close(self) -> None:
        for one in self.stores:
            one.close()
