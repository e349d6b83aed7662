"""Two machines as network namespaces, and the cable between them: this process passes each packet on, late or not at all.

It needs root and /dev/net/tun. The kernel's TCP makes the packets, and resends what was lost.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET = 1 << 16
IDLE_S = 0.2


def usable() -> bool:
    """Whether this process may make namespaces."""
    return os.geteuid() == 0 and Path("/dev/net/tun").exists() and shutil.which("ip") is not None


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class NetworkCable:
    """`with NetworkCable() as cable:`: commands with `cable.on(0)` before them run on the machine at `cable.addresses[0]`.

    Attributes:
        delay_s: of each packet.
        loss: the share of packets that is dropped.
    """

    addresses = ("10.77.0.1", "10.77.0.2")
    delay_s, loss = 0.0, 0.0

    def __init__(self, seed: int = 0):
        self.names = [f"quire-{os.getpid()}-{number}" for number in range(2)]
        self._devices = [f"qc{os.getpid()}n{number}" for number in range(2)]
        self._ends: list[int] = []
        self._random, self._open = random.Random(seed), True
        self.passed = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="cable", daemon=True)

    def __enter__(self) -> NetworkCable:
        try:
            for name, device, address in zip(
                self.names, self._devices, self.addresses, strict=True
            ):
                ip("netns", "add", name)
                end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                self._ends.append(end)
                fcntl.ioctl(
                    end, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI)
                )
                ip("link", "set", device, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
                ip("-n", name, "link", "set", "lo", "up")
                self.switch(len(self._ends) - 1, "up")
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for end in self._ends:
            os.close(end)
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)

    def on(self, machine: int) -> list[str]:
        """The first words of a command that runs on this machine."""
        return ["ip", "netns", "exec", self.names[machine]]

    def pids(self, machine: int) -> list[str]:
        """The processes on this machine."""
        return ip("netns", "pids", self.names[machine]).split()

    def switch(self, machine: int, state: str) -> None:
        """Set the machine's end of the cable "up" or "down"."""
        ip("-n", self.names[machine], "link", "set", self._devices[machine], state)

    def _run(self) -> None:
        late: deque[tuple[float, int, bytes]] = deque()  # when, to which end, what
        while self._open:
            wait = min(IDLE_S, max(0.0, late[0][0] - time.monotonic())) if late else IDLE_S
            for end in select.select(self._ends, [], [], wait)[0]:
                with suppress(OSError):  # the link is down
                    packet = os.read(end, MAX_PACKET)
                    if self._random.random() < self.loss:
                        self.dropped += 1
                        continue
                    other = self._ends[1 - self._ends.index(end)]
                    late.append((time.monotonic() + self.delay_s, other, packet))
            while late and late[0][0] <= time.monotonic():
                _, end, packet = late.popleft()
                with suppress(OSError):
                    os.write(end, packet)
                    self.passed += 1
