"""Processed pictures that are kept for later requests: the least recently used go first. Knows sizes. Thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from quire.protocol.tensor_data import TensorData

Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """A picture that is processed, and not in a prompt yet.

    Attributes:
        digest: of the file.
        ids: the tokens that replace its placeholder.
        runs: (offset, length) of those that take rows of the tower.
        grid: (time, height, width) in rows; zeros: the model does not need it.
        tensors: what the tower takes.
    """

    digest: str
    ids: list[int]
    runs: Runs
    grid: tuple[int, int, int]
    tensors: dict[str, TensorData]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values()) + 8 * len(self.ids)


class ProcessedCache:
    """At most `most` bytes."""

    def __init__(self, most: int):
        self.most, self.bytes, self.queries, self.hits = most, 0, 0, 0
        self._kept: OrderedDict[tuple[str, str], ReadPicture] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, scope: str, digest: str) -> ReadPicture | None:
        """`scope`: whose pictures: how long an answer takes must not show others' pictures."""
        with self._lock:
            self.queries += 1
            if (picture := self._kept.get((scope, digest))) is not None:
                self.hits += 1
                self._kept.move_to_end((scope, digest))
            return picture

    def put(self, scope: str, picture: ReadPicture) -> None:
        with self._lock:
            if picture.num_bytes > self.most or (scope, picture.digest) in self._kept:
                return
            self._kept[scope, picture.digest] = picture
            self.bytes += picture.num_bytes
            while self.bytes > self.most:
                _, dropped = self._kept.popitem(last=False)
                self.bytes -= dropped.num_bytes

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self.bytes = 0
