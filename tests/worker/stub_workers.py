"""Workers that do nothing, or cannot be made. No torch here, so that a child is quick."""

from __future__ import annotations

import os

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


class Idle:
    def call(self, name: str, *args):
        return name


def idle(payload: bytes, report) -> Idle:
    return Idle()
