"""Encoder cache: rows of the towers by the digest of a picture, a video or sound; the least recently used go first.

Knows sizes. Does not know requests: a row that needs an item that is gone has it encoded again.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor


class EncoderCache:
    """At most `most_rows` rows; the last item stays in any case."""

    def __init__(self, most_rows: int):
        self.most_rows, self.num_rows = most_rows, 0
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return sum(rows_NF.nbytes for rows_NF in self._kept.values())

    def get(self, digest: str) -> Tensor | None:
        """rows_NF, or None."""
        if (rows_NF := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
        return rows_NF

    def put(self, digest: str, rows_NF: Tensor) -> None:
        self._kept[digest] = rows_NF
        self.num_rows += len(rows_NF)
        while self.num_rows > self.most_rows and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self.num_rows -= len(dropped)

    def clear(self) -> None:
        self._kept.clear()
        self.num_rows = 0
