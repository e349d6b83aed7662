"""Staging buffer: collects integers on the host and sends them to the device in one copy.

Knows when host memory may be written again. Does not know what the integers mean. On a CPU both sides are the same
memory and nothing is copied.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LINE = 4  # integers: parts start at multiples of 16 bytes, so that the device can use wide loads


class StagingBuffer:
    """Space for `size` int32. Parts that are added one after the other go to the device in one copy.

    Args:
        copies: host buffers, used in turn. A copy may still be in flight when the next step is staged, so there must
            be one more than there are steps in flight; `begin` waits for a host buffer whose copy is not done.
        pin: whether to use pinned host memory; only for an accelerator.
    """

    def __init__(self, size: int, device: torch.device | str, copies: int = 3, pin: bool = True):
        self.device, self.size = torch.device(device), size
        self.is_accelerator = self.device.type != "cpu"
        self.hosts = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pin and self.is_accelerator)
            for _ in range(copies)
        ]
        self.events: list[torch.Event | None] = [None] * copies
        self.device_copy = (
            torch.zeros(size, dtype=torch.int32, device=self.device)
            if self.is_accelerator
            else None
        )
        self.turn, self.used = 0, 0
        self.array = self.hosts[0].numpy()

    def begin(self) -> None:
        """Start a new upload; waits if the device has not read this host buffer yet."""
        self.turn, self.used = (self.turn + 1) % len(self.hosts), 0
        if (event := self.events[self.turn]) is not None:
            event.synchronize()
        self.array = self.hosts[self.turn].numpy()

    def append(self, part: np.ndarray) -> slice:
        """Add a part; returns its slice of the upload.

        Raises:
            ValueError: there is no space left.
        """
        start, end = self.used, self.used + len(part)
        if end > self.size:
            raise ValueError(f"{end} integers do not fit a staging buffer of {self.size}")
        self.array[start:end] = part
        self.used = -(-end // LINE) * LINE
        return slice(start, end)

    def upload(self) -> Tensor:
        """All parts, on the device. The tensor is valid until the next upload is queued."""
        host = self.hosts[self.turn]
        used = min(self.used, self.size)
        if self.device_copy is None:
            return host[:used]
        self.device_copy[:used].copy_(host[:used], non_blocking=True)
        event = self.events[self.turn] or torch.Event(self.device)
        event.record()
        self.events[self.turn] = event
        return self.device_copy[:used]
