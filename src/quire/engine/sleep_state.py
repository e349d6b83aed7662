"""Keeps an engine's sleep state across restarts: a new process of the engine pauses or sleeps as the old one did.

Knows a file beside the engine's folders, and the named functions of `sleep.py`. Only completed operations are kept: if
the engine dies while a caller waits for a pause, the new process is not paused, and the caller gets an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec

from quire.logging import get_logger

log = get_logger(__name__)

FILE = "sleep-state"
CHANGE = ("pause", "resume", "sleep", "release_kv_cache", "wake_up")

Functions = dict[str, Callable[..., Any]]


def restore_sleep_state(functions: Functions, path: Path) -> None:
    """Restore the sleep state that an earlier process wrote."""
    if path.exists():
        state = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        functions["restore_state"](state)
        if state["paused"] or state["level"] >= 0:
            log.warning("restored the sleep state of the previous engine process: %s", state)


def persisting(functions: Functions, path: Path) -> Functions:
    """The same functions; those that change the sleep state write it to `path` before they return."""

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            finally:
                try:
                    new = path.with_suffix(".new")
                    new.write_bytes(msgspec.json.encode(functions["saved_state"]()))
                    os.replace(new, path)
                except OSError as why:
                    log.warning("a restarted engine will not restore this sleep state: %s", why)

        return call

    return functions | {name: keeping(functions[name]) for name in CHANGE}
