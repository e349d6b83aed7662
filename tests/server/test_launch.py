"""A server without an engine: stopped at any moment, it ends with the right exit status."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from socket import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from quire.config.engine import EngineConfig
from quire.config.server import ServerConfig
from quire.processes.child import STOP
from quire.server.api_keys import ApiKeys
from quire.server.process import http_supervisor, sockets
from quire.server.process.server_process import ServerProcess

WORKERS = 64  # more threads than an event loop has by itself


@pytest.fixture
def listener() -> Iterator[socket]:
    with sockets.bind(ServerConfig(host="127.0.0.1", port=0)) as made:
        yield made


def lived(serving: ServerProcess) -> int:
    async def main() -> int:
        return await asyncio.wait_for(serving.run(), 60)

    return asyncio.run(main())


def serving_of(listener: socket, client: Any, start: Any) -> ServerProcess:
    config = EngineConfig.from_keywords(model="none", host="127.0.0.1", port=0)
    serving = ServerProcess(config, listener, client, ApiKeys(config.server))
    serving._start = start  # type: ignore[method-assign]
    return serving


def test_a_stop_at_the_end_of_loading_is_obeyed(listener: socket):
    """(It looked like an engine that had died, which is status 1.)"""

    async def start() -> None:
        serving.stop(signal.SIGTERM)

    serving = serving_of(listener, Mock(), start)
    assert lived(serving) == 0


def test_shutdown_ends_although_all_threads_wait(listener: socket):
    """(The end of the engine waited for requests that only this end could release.)"""
    closed = threading.Event()

    async def start() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(WORKERS):
            loop.run_in_executor(None, closed.wait)
        serving.stop(signal.SIGTERM)

    serving = serving_of(listener, SimpleNamespace(close=closed.set), start)
    try:
        assert lived(serving) == 0
    finally:
        closed.set()


LOADS_FOR_EVER = """
import os, sys, threading
from quire.config.engine import EngineConfig
from quire.server.process import inline_engine, launch

def load(config, **others):
    print("loading", flush=True)
    threading.Event().wait()

inline_engine.start_engine = load
config = EngineConfig.from_keywords(
    model="none", uds=sys.argv[1], disable_frontend_multiprocessing=True, disable_log_stats=True
)
status = launch.serve(config)
print("nobody waits for the thread", flush=True)
sys.exit(status)
"""


@pytest.mark.usefixtures("interruptible", "sighup_ends")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_single_process_server_can_be_stopped_while_loading(
    tmp_path: Path, number: signal.Signals
):
    """(It went on loading, and then it ended.)"""
    place = tmp_path / "socket"
    words = [sys.executable, "-c", LOADS_FOR_EVER, str(place)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "loading\n"
            assert place.exists()
            server.send_signal(number)
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert not place.exists()


def test_under_nohup_sighup_does_not_end_the_server(tmp_path: Path):
    place = tmp_path / "socket"
    words = ["nohup", sys.executable, "-c", LOADS_FOR_EVER, str(place)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as server:  # fmt: skip
        try:
            assert server.stdout.readline() == "loading\n"
            server.send_signal(signal.SIGHUP)
            transport = httpx.HTTPTransport(uds=str(place), retries=3)
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                assert client.get("/health/live").status_code == 200
            assert server.poll() is None
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


@pytest.mark.parametrize("key_file", [None, "keys.yaml"])
def test_the_supervisor_ends_at_sighup_or_reads_the_keys(
    key_file: str | None, monkeypatch: pytest.MonkeyPatch
):
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(http_supervisor.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(http_supervisor.signal, "getsignal", lambda number: signal.SIG_DFL)
    monkeypatch.setattr(http_supervisor.HttpSupervisor, "_turn", lambda self: 0)
    monkeypatch.setattr(http_supervisor.HttpSupervisor, "_read_stats", lambda self: None)
    keeper = http_supervisor.HttpSupervisor.__new__(http_supervisor.HttpSupervisor)
    keeper.config = EngineConfig.from_keywords(model="none", api_key_file=key_file)
    keeper.stop_at, keeper.client, front = None, Mock(), Mock()
    keeper.children = []
    assert keeper.run() == 0
    keeper.children = [http_supervisor.HttpWorkerSlot(0, None, Mock(), front)]
    handlers[signal.SIGHUP](signal.SIGHUP, None)
    assert (keeper.stop_at is None) == (key_file is not None)
    front.send_signal.assert_called_once_with(STOP if key_file is None else signal.SIGHUP)


def test_a_worker_that_starts_during_shutdown_is_stopped(
    listener: socket, monkeypatch: pytest.MonkeyPatch
):
    """(It served on until it was killed.)"""
    started = Mock(poll=Mock(return_value=None))

    def start(*words: Any, **more: Any) -> Mock:
        keeper.stop_at = 1.0  # the signal comes now, before the supervisor has recorded this child
        return started

    monkeypatch.setattr(http_supervisor, "start_child", start)
    keeper = http_supervisor.HttpSupervisor.__new__(http_supervisor.HttpSupervisor)
    keeper.engines, keeper.count, keeper.payload = [Mock(folder="/x")], 1, b""
    keeper.metrics_folder, keeper.stop_at = Mock(), None
    child = http_supervisor.HttpWorkerSlot(0, listener, Mock())
    keeper._start(child)
    assert child.process is not None
    child.process.status.close()
    started.send_signal.assert_called_once_with(STOP)
