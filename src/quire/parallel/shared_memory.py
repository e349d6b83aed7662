"""SharedMemoryRanks: the ranks of one machine exchange tensors through memory that they share.

Knows one block of memory (`address.py`). Does not know layers. The kernels copy and wait
(ops/cpu/kernels/exchange.cpp).

Shape suffixes: R ranks, T tokens, W width of one rank's part.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import RankLost, Unsupported
from quire.ops.cpu.bindings import best
from quire.parallel.address import SLOT, num_bytes


class SharedMemoryRanks:
    """See `TensorRanks` (parallel/ranks.py).

    Args:
        fd: of the memory, inherited from the executor. It is closed.
        timeout_s: how long a rank waits for another. The executor ends all ranks when one ends, so this is for a rank that is
            alive and does not come: it may read weights from a slow disk.

    Raises:
        Unsupported: there are no native kernels.
    """

    def __init__(self, fd: int, rank: int, size: int, timeout_s: float = 60.0):
        kernels = best()
        if kernels is None:
            raise Unsupported(
                f"tensor_parallel_size={size} without the native CPU kernels", "use 1"
            )
        self.rank, self.size = rank, size
        self._kernels, self._timeout_ms = kernels, int(timeout_s * 1000)
        self._memory = mmap.mmap(fd, num_bytes(size))
        os.close(fd)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def gather(self, x_TW: Tensor) -> Tensor:
        """The parts of all ranks side by side: [T, R * W].

        Raises:
            RankLost: another rank did not come in time.
        """
        x_TW = x_TW.contiguous()
        rows, width = x_TW.shape
        all_TX = torch.empty(rows, self.size * width, dtype=x_TW.dtype)
        num_bytes = width * x_TW.itemsize
        if num_bytes > SLOT:
            raise ValueError(f"a row of {num_bytes} bytes does not fit into a slot of {SLOT}")
        lost = self._kernels.all_gather(
            self._address, self.rank, self.size, SLOT, x_TW.data_ptr(), rows, num_bytes,
            all_TX.data_ptr(), self._timeout_ms,
        )  # fmt: skip
        if lost:
            raise RankLost(
                f"rank {self.rank} of {self.size} waited {self._timeout_ms / 1000:g} s for rank {lost - 1}"
            )
        return all_TX

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number among the ranks."""
        own = torch.tensor([numbers], dtype=torch.int64)
        found: list[int] = self.gather(own).view(self.size, -1).amin(0).tolist()
        return found
