"""Packs rows of many weights by few calls of the kernels, straight from the mapped files, while the system reads ahead.

Knows no layout: the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.platforms.memory import read_ahead

PACKED_BYTES = 64 << 20  # bytes that one call packs, while the system reads as many from the files


class Packing:
    """Rows that wait for the kernels; a weight is complete after `finish`.

    Args:
        pack: called with (number of rows, address of the table).
    """

    def __init__(self, pack: Callable[[int, int], object]):
        self._pack = pack
        self._waiting: list[tuple[Sequence[int], tuple[Tensor, ...]]] = []
        # those that the files should have by now; bytes of others
        self._num_read, self._size = 0, 0

    def add(self, numbers: Sequence[int], *rows_ON: Tensor) -> None:
        """`numbers`: a row of the kernels' table, with the addresses of the tensors."""
        self._waiting.append((numbers, rows_ON))
        for each in rows_ON:
            read_ahead(each)
        self._size += sum(each.nbytes for each in rows_ON)
        if self._size >= PACKED_BYTES:
            self._call(self._num_read)
            self._num_read, self._size = len(self._waiting), 0

    def finish(self) -> None:
        self._call(len(self._waiting))
        self._num_read = self._size = 0

    def _call(self, count: int) -> None:
        if count:
            table = torch.tensor([numbers for numbers, _ in self._waiting[:count]])
            self._pack(table.data_ptr(), count)
            del self._waiting[:count]
