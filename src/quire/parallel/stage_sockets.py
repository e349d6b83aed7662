"""StageSockets: stages of a pipeline hand tensors over through connected stream sockets, on one machine or between machines.

Knows sockets and frames. Does not know layers or plans. A wait takes no processor time, and ends when the other stage ends:
its socket closes.

    frame: length of the header (8 bytes), header (msgpack), the tensors' bytes one after the other

Shape suffixes: T tokens, D features.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait as ready_for_reading
from typing import Any

import msgspec
import torch
from torch import Tensor

from quire import env
from quire.errors import PlanMismatch, RankLost
from quire.parallel.ranks import LOOK_S, START_S
from quire.parallel.regions import StageSocketFds

LENGTH = struct.Struct("<Q")
MAX_HEADER = 1 << 26
"""Bytes of a header, at most: it has the tokens of a step."""


class StageFrame(msgspec.Struct, array_like=True):
    """The header of a frame: the step, (dtype, shape) of the tensors, and what is no tensor."""

    step: int
    tensors: list[tuple[str, list[int]]] = []
    data: bytes = b""


class StageSockets:
    """See `StageLink` (parallel/stages.py).

    Args:
        fds: of the sockets. They are closed with this object.
        timeout_s: how long a stage waits for another that is alive; None: as long as a step may take
            (QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS).
        look: called each second of a wait; its RankLost ends the wait.
    """

    def __init__(
        self, stage: int, size: int, fds: StageSocketFds, timeout_s: float | None = None,
        look: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self.stage, self.size, self.step, self._look = stage, size, 0, look
        self._timeout_s = timeout_s or float(env.get("EXECUTE_MODEL_TIMEOUT_SECONDS"))
        self._previous, self._next = (
            None if fd < 0 else socket.socket(fileno=fd) for fd in (fds.previous, fds.next)
        )
        self._others = [socket.socket(fileno=fd) for fd in fds.others]
        self._limit_s = self._timeout_s
        for one in self._sockets():
            one.settimeout(min(LOOK_S, self._timeout_s))
        self._decoder = msgspec.msgpack.Decoder(StageFrame)

    def send(self, tensors_TD: Sequence[Tensor]) -> None:
        """To the next stage. Raises RankLost: it has ended, or does not receive in time."""
        tensors = [tensor.contiguous() for tensor in tensors_TD]
        about = [(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in tensors]
        parts = [_bytes_of(each) for each in tensors]
        self._send(self._next, self.stage + 1, StageFrame(self.step, about), parts)

    def receive(self) -> list[Tensor]:
        """What the previous stage sent for this step.

        Raises:
            RankLost: it has ended, or does not send in time.
            PlanMismatch: it sent another step's.
        """
        frame = self._frame(self._previous, self.stage - 1)
        if frame.step != self.step:
            raise PlanMismatch(
                f"stage {self.stage - 1} sent hidden states of step {frame.step} for step {self.step}"
            )
        tensors = []
        for dtype, shape in frame.tensors:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._fill(self._previous, self.stage - 1, _bytes_of(tensor))
            tensors.append(tensor)
        return tensors

    def announce(self, data: bytes) -> None:
        """From the last stage to all others. Raises RankLost: one has ended."""
        for stage, one in enumerate(self._others):
            self._send(one, stage, StageFrame(self.step, data=data))

    def announced(self, wait: bool) -> bytes | None:
        """What the last stage announced next; None: nothing has come yet. Raises RankLost: it has ended, or does not send in time."""
        last = self._others[0]
        if not wait and not ready_for_reading([last], 0):
            return None
        return self._frame(last, self.size - 1).data

    def least(self, numbers: Sequence[int]) -> list[int]:
        """See `StageLink`."""
        least, self._limit_s = list(numbers), START_S
        if self._previous is not None:
            before = self._frame(self._previous, self.stage - 1)
            least = [min(pair) for pair in zip(least, _numbers(before), strict=True)]
        frame = StageFrame(0, data=msgspec.msgpack.encode(least))
        if self._next is not None:
            self._send(self._next, self.stage + 1, frame)
            least = _numbers(self._frame(self._others[0], self.size - 1))
        else:
            self.announce(frame.data)
        self._limit_s = self._timeout_s
        return least

    def close(self) -> None:
        """The other stages find that this one has ended."""
        for one in self._sockets():
            one.close()

    def _sockets(self) -> list[socket.socket]:
        return [one for one in (self._previous, self._next, *self._others) if one is not None]

    # -- frames ---------------------------------------------------------------------------------
    def _send(
        self,
        to: socket.socket | None,
        stage: int,
        frame: StageFrame,
        parts: Sequence[memoryview] = (),
    ) -> None:
        header = msgspec.msgpack.encode(frame)
        for part in (memoryview(LENGTH.pack(len(header)) + header), *parts):
            self._move(to.send, stage, part)  # type: ignore[union-attr]

    def _frame(self, source: socket.socket | None, stage: int) -> StageFrame:
        length = LENGTH.unpack(self._fill(source, stage, memoryview(bytearray(LENGTH.size))))[0]
        if length > MAX_HEADER:
            raise RankLost(f"stage {stage} sent a header of {length} bytes")
        return self._decoder.decode(self._fill(source, stage, memoryview(bytearray(length))))

    def _fill(self, source: socket.socket | None, stage: int, into: memoryview) -> memoryview:
        """Read as many bytes as fit."""
        self._move(source.recv_into, stage, into)  # type: ignore[union-attr]
        return into

    def _move(self, move: Callable[[memoryview], int], stage: int, left: memoryview) -> None:
        """Send or receive all of these bytes."""
        about, began = f"stage {self.stage} of {self.size}", time.monotonic()
        while left:
            try:
                count = move(left)
            except TimeoutError:
                if time.monotonic() - began >= self._limit_s:
                    raise RankLost(
                        f"{about} waited {self._limit_s:g} s for stage {stage}"
                    ) from None
                self._look()
                continue
            except OSError as error:
                raise RankLost(f"{about} lost stage {stage}, which has ended: {error}") from None
            if not count:
                raise RankLost(f"stage {stage} of {self.size} has ended")
            left = left[count:]


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _numbers(frame: StageFrame) -> list[int]:
    return msgspec.msgpack.decode(frame.data, type=list[int])
