"""`make test` runs the tests in two processes. This file assigns the folders to them.

So the predecessors of a test are the same in every run, and in the usual order. A process collects only its own folders,
since an import of all tests takes as long as a hundred of them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.each import EachScheduling

TESTS = Path(__file__).parent
FIRST = (
    "docs",
    "equality",
    "media",
    "parallel",
    "processes",
    "server",
    "speculation",
    "structured",
)  # they take as long as all the rest


def is_others(path: Path, config: pytest.Config) -> bool:
    """Whether the other process runs the tests of a path below this folder."""
    worker = getattr(config, "workerinput", None)
    if worker is None or not path.is_relative_to(TESTS) or path == TESTS:
        return False
    is_first = path.relative_to(TESTS).parts[0] in FIRST
    return is_first != (worker["workerid"] == "gw0")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return is_others(collection_path, config) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files named on the command line are collected by both."""
    items[:] = [item for item in items if not is_others(item.path, config)]


class Halves(EachScheduling):
    """Each process runs all that it collected."""

    def __init__(self, config: pytest.Config, log: Any):
        super().__init__(config, log)
        self.started, self.seconds = 0.0, dict[str, float]()

    def schedule(self) -> None:
        count = sum(map(len, self.node2collection.values()))
        self.config.pluginmanager.get_plugin("session").testscollected = count
        self.started = time.monotonic()
        super().schedule()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        self.seconds[node.gateway.id] = time.monotonic() - self.started

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        first, rest = (self.seconds.get(id, 0.0) for id in ("gw0", "gw1"))
        text = f"{', '.join(FIRST)}: {first:.0f} s; all other folders: {rest:.0f} s"
        terminalreporter.write_line(text)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Halves:
    if len(config.option.tx) != 2:
        raise pytest.UsageError("tests.xdist_schedule makes two halves: use -n 2")
    halves = Halves(config, log)
    config.pluginmanager.register(halves)
    return halves
