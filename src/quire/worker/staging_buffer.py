"""Twin: integers on the host and the same integers on the device, one copy apart.

Knows memory and when it may be written again. Does not know what the integers mean. On a CPU both are one memory and
nothing is copied.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LINE = 4  # integers: what starts at multiples of 16 bytes is read in one piece


class StagingBuffer:
    """Room for `size` int32. Parts that are laid down one after the other travel in one copy.

    Args:
        copies: host sides that are used in turn. A copy may still be under way when the next step is laid down, so
            as many as there are steps in flight, and one more; a host side whose copy is not done is waited for.
        pin: host memory that the device reads by itself; only where there is a device.
    """

    def __init__(self, size: int, device: torch.device | str, copies: int = 3, pin: bool = True):
        self.device, self.size = torch.device(device), size
        self.apart = self.device.type != "cpu"
        self.hosts = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pin and self.apart)
            for _ in range(copies)
        ]
        self.events: list[torch.Event | None] = [None] * copies
        self.here = torch.zeros(size, dtype=torch.int32, device=self.device) if self.apart else None
        self.turn, self.used = 0, 0
        self.array = self.hosts[0].numpy()

    def begin(self) -> None:
        """Start laying down; waits if the device has not read this host side yet."""
        self.turn, self.used = (self.turn + 1) % len(self.hosts), 0
        if (event := self.events[self.turn]) is not None:
            event.synchronize()
        self.array = self.hosts[self.turn].numpy()

    def lay(self, part: np.ndarray) -> slice:
        """Add a part; where it lies.

        Raises:
            ValueError: there is no room.
        """
        start, end = self.used, self.used + len(part)
        if end > self.size:
            raise ValueError(f"{end} integers do not fit a twin of {self.size}")
        self.array[start:end] = part
        self.used = -(-end // LINE) * LINE
        return slice(start, end)

    def upload(self) -> Tensor:
        """All that was laid down, on the device: valid until the upload after this one has been queued."""
        host = self.hosts[self.turn]
        used = min(self.used, self.size)
        if self.here is None:
            return host[:used]
        self.here[:used].copy_(host[:used], non_blocking=True)
        event = self.events[self.turn] or torch.Event(self.device)
        event.record()
        self.events[self.turn] = event
        return self.here[:used]
