"""Processed pictures that are kept for later requests: the least recently used go first. Knows sizes. Thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from quire.protocol.tensor_data import TensorData

Runs = list[tuple[int, int]]
MOST_NAMES = 1 << 16


@dataclass(frozen=True, slots=True)
class ReadMedia:
    """A picture that is processed, and not in a prompt yet.

    Attributes:
        kind: of its MediaItem.
        digest: of the file.
        text: what replaces its placeholder, with one token for each run of rows.
        ids: the tokens that replace its placeholder.
        runs: (offset, length) of those that take rows of the tower.
        grids: (time, height, width) of each run in rows; empty: the model does not need it.
        tensors: what the tower takes.
        interval: see `TowerInput`.
    """

    kind: str
    digest: str
    text: str
    ids: list[int]
    runs: Runs
    grids: list[tuple[int, int, int]]
    tensors: dict[str, TensorData]
    interval: float = 1.0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values()) + 8 * len(self.ids)


class ProcessedCache:
    """At most `most` bytes. Clients may give pictures names, by which they ask for them again while they are here."""

    def __init__(self, most: int):
        self._names: OrderedDict[tuple[str, str], str] = OrderedDict()
        self.most, self.bytes, self.queries, self.hits = most, 0, 0, 0
        self._kept: OrderedDict[tuple[str, str], ReadMedia] = OrderedDict()
        self._lock = threading.Lock()
        self.changed: Callable[[int], object] = lambda num_bytes: None
        """Called with the bytes that are kept, when these have changed."""

    def get(self, scope: str, digest: str) -> ReadMedia | None:
        """`scope`: whose pictures: how long an answer takes must not show others' pictures."""
        with self._lock:
            self.queries += 1
            if (picture := self._kept.get((scope, digest))) is not None:
                self.hits += 1
                self._kept.move_to_end((scope, digest))
            return picture

    def put(self, scope: str, picture: ReadMedia) -> None:
        with self._lock:
            if picture.num_bytes > self.most or (scope, picture.digest) in self._kept:
                return
            self._kept[scope, picture.digest] = picture
            self.bytes += picture.num_bytes
            while self.bytes > self.most:
                _, dropped = self._kept.popitem(last=False)
                self.bytes -= dropped.num_bytes
            self.changed(self.bytes)

    def name(self, scope: str, uuid: str, digest: str) -> None:
        """From now on this name means this picture, in this scope."""
        with self._lock:
            self._names[scope, uuid] = digest
            self._names.move_to_end((scope, uuid))
            if len(self._names) > MOST_NAMES:
                self._names.popitem(last=False)

    def named(self, scope: str, uuid: str) -> ReadMedia | None:
        """The picture of a name, if it is still here."""
        digest = self._names.get((scope, uuid))
        return None if digest is None else self.get(scope, digest)

    def clear(self) -> None:
        with self._lock:
            self._names.clear()
            self._kept.clear()
            self.bytes = 0
            self.changed(0)
