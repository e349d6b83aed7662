"""Servers to attack: one for the whole folder, or one with its own flags; never two at once, never another machine's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from attacked_server import AttackedServer, only_this_machine

Start = Callable[..., AttackedServer]


class Shared:
    """The server for all tests without their own flags, one after the other."""

    def __init__(self) -> None:
        self.stack, self.server = ExitStack(), None

    server: AttackedServer | None

    def get(self) -> AttackedServer:
        server = self.server
        if server is None or server.spoiled or server.process.poll() is not None:
            self.close()
            self.server = self.stack.enter_context(AttackedServer())
        return self.server

    def close(self) -> None:
        self.server = None
        self.stack.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    with only_this_machine():
        held = Shared()
        yield held
        held.close()


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with only_this_machine():
        yield


@pytest.fixture
def server(shared: Shared) -> AttackedServer:
    """The embedded model, without a key."""
    return shared.get()


@pytest.fixture
def started(shared: Shared) -> Iterator[Start]:
    """`started("--api-key", "k", key="k")`: a server with its own flags (and `env`), for one test."""
    with ExitStack() as stack:

        def start(*flags: str, env: dict[str, str] | None = None, **more: Any) -> AttackedServer:
            shared.close()
            stack.close()
            return stack.enter_context(AttackedServer(*flags, env=env, **more))

        yield start


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the server after the last test of the folder, not at the end of the session."""
    here = os.path.dirname(__file__)
    if nextitem is None or not str(nextitem.path).startswith(here):
        held = getattr(item, "funcargs", {}).get("shared")
        if held is not None:
            held.close()
