"""A server for each engine at ports side by side, and the supervisor that watches them."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
from test_data_parallel import BODY, MODEL, PATIENCE_S, Served, children, until

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.server.process.port_supervisor import PortSupervisor


def free_ports(count: int) -> int:
    """The first of `count` free ports side by side."""
    for first in range(20_000 + os.getpid() % 20_000, 60_000, count):
        sockets = []
        try:
            for port in range(first, first + count):
                one = socket.socket()
                sockets.append(one)
                one.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")


@pytest.mark.slow
def test_servers_at_ports_side_by_side_are_one_unit() -> None:
    first = free_ports(3)
    flags = ["-dp", "2", "-dpl", "2", "-dpm", "--port", str(first), "--max-model-len", "256"]
    server = Served(MODEL, *flags, "--data-parallel-supervisor-port", str(first + 2))
    try:
        server.until("2 servers are ready")
        health = f"http://127.0.0.1:{first + 2}/health"
        assert httpx.get(health).json() == {str(first): True, str(first + 1): True}
        for rank in (0, 1):
            url = f"http://127.0.0.1:{first + rank}"
            assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE_S).status_code == 200  # fmt: skip
            assert f'vllm:num_requests_running{{engine="{rank}"' in httpx.get(f"{url}/metrics").text
        before = children(server.process.pid)
        os.kill(before[0], signal.SIGKILL)
        until(lambda: httpx.get(health).status_code == 503)
        until(lambda: httpx.get(health, timeout=PATIENCE_S).status_code == 200)
        family = children(server.process.pid)
        assert not set(before) & set(family)
        assert server.stop(signal.SIGTERM) == 0
        assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
    finally:
        server.process.kill()
        server.wait()


@pytest.mark.parametrize("more", [{"port": 0}, {"uds": "/tmp/quire.sock"}])
def test_what_several_servers_cannot_share_is_refused(more: dict[str, object]) -> None:
    config = EngineConfig.from_keywords(
        model=MODEL, data_parallel_size=2, data_parallel_size_local=2,
        data_parallel_multi_port_external_lb=True, **more,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--port N"):
        PortSupervisor(config)


def test_no_client_holds_the_port_of_health() -> None:
    port = free_ports(3)
    config = EngineConfig.from_keywords(
        model=MODEL, data_parallel_size=2, data_parallel_size_local=2, port=port, receive_timeout=0.5,
        data_parallel_multi_port_external_lb=True, data_parallel_supervisor_port=port + 2,
    )  # fmt: skip
    supervisor = PortSupervisor(config)
    threads = threading.active_count()
    http = supervisor._answer_health()
    assert http is not None
    slow = [socket.create_connection(("127.0.0.1", port + 2), 60) for _ in range(40)]
    try:
        for one in slow:
            one.sendall(b"GET /health HTTP/1.1\r\nX: ")
        health = f"http://127.0.0.1:{port + 2}/health"
        assert httpx.get(health, timeout=60).status_code == 503
        supervisor.health = dict.fromkeys(supervisor.health, True)
        assert httpx.get(health, timeout=60).json() == {str(port): True, str(port + 1): True}
        assert threading.active_count() <= threads + 1
        assert {one.recv(99) for one in slow} == {b""}
        assert httpx.get(health, timeout=60).status_code == 200
        with pytest.raises(ConfigError, match=r"in use.*with --data-parallel-supervisor-port"):
            supervisor._answer_health()
        supervisor._end()  # the servers drain: they take no new requests
        assert httpx.get(health, timeout=60).status_code == 503
    finally:
        http.should_exit = True
        for one in slow:
            one.close()
