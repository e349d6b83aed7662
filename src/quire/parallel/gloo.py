"""GlooGroup: the ranks of a group on several machines exchange tensors by gloo, torch's TCP collectives.

Knows torch's process group of gloo, and that its ranks find each other through a store. Does not know layers or machines.

Shape suffixes: R ranks, T tokens, W width of one rank's part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import torch.distributed
from torch import Tensor

from quire.errors import RankLost
from quire.parallel.ranks import LOOK_S, START_S
from quire.parallel.rendezvous import MAX_BYTES, TableRequest

dist: Any = torch.distributed  # most of its names have no types


class RendezvousStore(dist.Store):  # type: ignore[misc]
    """The head's table (`rendezvous.py`) as torch's store, in the part that gloo uses. One thread at a time.

    Args:
        seconds: how long `get` waits for a value.
    """

    def __init__(self, connection: Connection, seconds: float):
        super().__init__()
        self._connection, self._seconds = connection, seconds

    def set(self, key: str, value: Any) -> None:
        self._ask(TableRequest(key, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """Raises RankLost: no rank has set the value in time."""
        if (value := self._ask(TableRequest(key, seconds=self._seconds))) is None:
            raise RankLost(f"another rank has not set {key!r} after {self._seconds:.0f} s")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _ask(self, request: TableRequest) -> bytes | None:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(request))
            data = self._connection.recv_bytes(MAX_BYTES)
        except (EOFError, OSError):
            raise RankLost("the engine's process closed the rendezvous of its ranks") from None
        return msgspec.msgpack.decode(data, type=bytes | None)


def prefixed(name: str, store: Any) -> Any:
    """A store in which each key begins with the name."""
    return dist.PrefixStore(name, store)


class GlooGroup:
    """See `RankGroup` (parallel/ranks.py).

    Args:
        store: where the ranks of the group, and of no other, find each other.
        rank, size: in the group.
        host: this machine's address, at which the others reach this rank.
        timeout_s: how long this rank waits for the others, at the start and in each exchange.
        look: called each second of a wait; its RankLost ends the wait.

    Raises:
        RankLost: the others did not come in time.
    """

    link: int | None = None

    def __init__(
        self, store: Any, rank: int, size: int, host: str, timeout_s: float,
        look: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self.rank, self.size, self._timeout_s, self._look = rank, size, timeout_s, look
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            options._devices = [gloo.create_device(hostname=host)]
            self._group = gloo(store, rank, size, options)
        except RuntimeError as why:
            raise RankLost(f"rank {rank} of {size} at {host} (QUIRE_HOST_IP, if that is set): {why}") from why  # fmt: skip

    def limit(self, timeout_s: float) -> None:
        """How long this rank waits for the others in each exchange from now on."""
        self._timeout_s = timeout_s
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def gather(self, x_TW: Tensor) -> Tensor:
        """The parts of all ranks side by side: [T, R * W].

        Raises:
            RankLost: another rank did not come in time, or its connection broke.
        """
        rows, width = x_TW.shape
        bytes_B = x_TW.contiguous().view(-1).view(torch.uint8)
        all_RTW = torch.empty(self.size, rows, width, dtype=x_TW.dtype)
        if bytes_B.numel():
            try:
                self._wait(self._group._allgather_base(all_RTW.view(-1).view(torch.uint8), bytes_B))
            except RuntimeError as why:
                raise RankLost(
                    f"rank {self.rank} of {self.size} lost another rank in an exchange of {bytes_B.numel()} bytes"
                    f" (limit {self._timeout_s:g} s): {why}"
                ) from why
        return all_RTW.transpose(0, 1).reshape(rows, self.size * width)

    def _wait(self, exchange: Any) -> None:
        """Raises RuntimeError: it failed. RankLost: it will not end."""
        while True:
            try:
                exchange.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if exchange.is_completed():
                    exchange.wait()  # raises why it failed; or it was completed at the end of this second
                    return
            try:
                self._look()
            except RankLost:
                # The group's destructor would wait for the exchange, so the group stays until the process ends.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                raise

    def check(self) -> None:
        """Kernels do not exchange by gloo."""

    def least(self, numbers: Sequence[int]) -> list[int]:
        """See `RankGroup`."""
        numbers_N, before = torch.tensor([numbers], dtype=torch.int64), self._timeout_s
        self.limit(START_S)
        try:
            least: list[int] = self.gather(numbers_N).view(self.size, -1).amin(0).tolist()
        finally:
            self.limit(before)
        return least
