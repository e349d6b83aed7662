"""`make test` runs the tests in two processes. This file assigns the folders to them.

So the predecessors of a test are the same in every run, and in the usual order.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

FIRST = ("equality", "processes", "server", "structured")  # they take as long as all the rest


class Halves(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return "first" if nodeid.removeprefix("tests/").split("/")[0] in FIRST else "rest"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Halves:
    return Halves(config, log)
