"""An engine without requests ends when the process of one of its workers has ended."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine import engine_main
from quire.errors import EngineDeadError

WHY = "rank 1: the worker's process was ended by SIGKILL"


def test_an_idle_engine_ends_and_a_busy_one_finds_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(engine_main, "LOOK_EVERY_S", 0.001)
    ended = threading.Event()
    core: Any = SimpleNamespace(idle=False, broken=None, inbox=SimpleQueue())
    core.executor = SimpleNamespace(lost=lambda: WHY if ended.is_set() else "")
    engine_main.watch_workers(core)
    ended.set()
    with pytest.raises(Empty):
        core.inbox.get(timeout=0.05)
    core.idle = True
    assert core.inbox.get(timeout=60) is None
    assert isinstance(core.broken, EngineDeadError)
    assert str(core.broken) == WHY
