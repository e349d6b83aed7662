"""Workers that do nothing, or cannot be made. No torch here, so that a child is quick."""

from __future__ import annotations

import os

from quire.errors import ConfigError


def misconfigured(payload: bytes):
    raise ConfigError("max_num_seqs must be even")


def broken(payload: bytes):
    raise ZeroDivisionError("in the middle of loading")


def vanishing(payload: bytes):
    os._exit(7)


class Idle:
    def call(self, name: str, *args):
        return name


def idle(payload: bytes) -> Idle:
    return Idle()
