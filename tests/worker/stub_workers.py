"""Workers that do nothing, or cannot be made. No torch here, so that a child is quick."""

from __future__ import annotations

import os
import time
from pathlib import Path

from quire.errors import ConfigError


def misconfigured(payload: bytes, report):
    raise ConfigError("max_num_seqs must be even")


def broken(payload: bytes, report):
    raise ZeroDivisionError("in the middle of loading")


def slow(payload: bytes, report):
    for share in (0.25, 0.5):
        report("reading weights", share)
    return Idle()


def vanishing(payload: bytes, report):
    os._exit(7)


def waiting(payload: bytes, report):
    """Rank 0 waits until rank 1 has loaded its weights."""
    rank, _, path = payload.decode().partition(" ")
    if rank == "1":
        for number in range(1000):
            report("reading weights", number / 1000)
        Path(path).touch()
    until = time.monotonic() + 20
    while not Path(path).exists():
        if time.monotonic() > until:
            raise TimeoutError("the other rank does not come")
        time.sleep(0.01)
    return Idle()


class Idle:
    def call(self, name: str, *args):
        return name


def idle(payload: bytes, report) -> Idle:
    return Idle()
