"""SharedMemoryGroup: the ranks of one machine exchange tensors through memory that they share.

Knows one block of memory (`rank_address.py`). Does not know layers. The kernels copy and wait
(ops/cpu/kernels/exchange.cpp).

Shape suffixes: R ranks, T tokens, W width of one rank's part.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import RankLost, Unsupported
from quire.ops.cpu.bindings import best
from quire.ops.cpu.structs import RANK_ENDED, RANK_STOPPED, CRankLink
from quire.parallel.ranks import START_S
from quire.parallel.regions import SLOT


class SharedMemoryGroup:
    """See `RankGroup` (parallel/ranks.py).

    Args:
        memory: of all groups; this group has a region from byte `begin` on.
        rank, size: within the group.
        timeout_s: how long a rank waits for another that is alive.

    Raises:
        Unsupported: there are no native kernels.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        begin: int,
        rank: int,
        size: int,
        timeout_s: float = 60.0,
    ):
        kernels = best()
        if kernels is None:
            raise Unsupported(
                f"tensor_parallel_size={size} without the native CPU kernels", "use 1"
            )
        self.rank, self.size = rank, size
        self._kernels, self._timeout_ms = kernels, int(timeout_s * 1000)
        self._memory = memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory, begin))
        self._link = CRankLink(address, rank, size, SLOT, self._timeout_ms)
        self.link: int | None = ctypes.addressof(self._link)
        kernels.join_ranks(self.link)

    def gather(self, x_TW: Tensor) -> Tensor:
        """The parts of all ranks side by side: [T, R * W].

        Raises:
            RankLost: another rank did not come in time, has ended, or is stopped.
        """
        x_TW = x_TW.contiguous()
        rows, width = x_TW.shape
        all_TX = torch.empty(rows, self.size * width, dtype=x_TW.dtype)
        num_bytes = width * x_TW.itemsize
        if num_bytes > SLOT:
            raise ValueError(f"a row of {num_bytes} bytes does not fit into a slot of {SLOT}")
        self._kernels.all_gather(self.link, x_TW.data_ptr(), rows, num_bytes, all_TX.data_ptr())
        self.check()
        return all_TX

    def check(self) -> None:
        """Raises RankLost: another rank did not come to an exchange of the kernels, so their results mean nothing."""
        fault = self._link.fault
        if not fault:
            return
        causes = {RANK_ENDED: "has ended", RANK_STOPPED: "is stopped (SIGSTOP, or a debugger)"}
        cause = causes.get(fault, f"did not come within {self._link.timeout_ms / 1000:g} s")
        raise RankLost(
            f"rank {self.rank} of {self.size} waited for rank {self._link.lost}, which {cause}"
        )

    def least(self, numbers: Sequence[int]) -> list[int]:
        """See `RankGroup`."""
        numbers_N = torch.tensor([numbers], dtype=torch.int64)
        self._link.timeout_ms = int(START_S * 1000)
        try:
            least: list[int] = self.gather(numbers_N).view(self.size, -1).amin(0).tolist()
        finally:
            self._link.timeout_ms = self._timeout_ms
        return least
