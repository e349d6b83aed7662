"""Supervises a server for each engine of this machine (--data-parallel-multi-port-external-lb).

    this process        starts and watches the servers; answers /health for all of them at --data-parallel-supervisor-port
    server 0 .. N-1     `quire serve` of one engine, at --port, --port + 1 ... (`port_server.py`)

Knows processes, signals and ports. Does not know routes. If a server ends, the others are stopped too, and all start again:
a load balancer that knows these ports sees either all of them or none. Imports no torch.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from types import FrameType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from quire.config.engine import EngineConfig, Resolved
from quire.config.serialize import resolved_to_bytes
from quire.engine.engine_launcher import restart_policy
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.frontend.startup import check_startup
from quire.logging import get_logger
from quire.processes.child import how_it_ended, start_child, wait_or_kill
from quire.processes.restart_policy import RestartCount
from quire.server.process.sockets import LOOPBACK, UvicornServer, bind, host_of, http_server
from quire.server.request_body import json_response
from quire.terminal import show

log = get_logger(__name__)

LOOK_EVERY_S = 0.2
PROBE_S = 2.0  # limit for a server to answer a probe
PROBE_EVERY_S = 1.0
GRACE_S = 15.0  # after the time that running requests may take to end


class PortSupervisor:
    """Starts, watches and restarts the servers.

    Raises:
        ConfigError: a port, a socket or TLS that several servers cannot share.
    """

    def __init__(self, config: EngineConfig):
        server = config.server
        if not server.port or server.uds is not None or server.ssl_certfile is not None:
            raise ConfigError(
                "data_parallel_multi_port_external_lb needs --port N, without --uds, and TLS belongs to the load balancer"
            )
        self.config, self.host = config, host_of(server)
        parallel = config.parallel
        count = parallel.data_parallel_size_local or 1
        self.ports = [server.port + index for index in range(count)]
        self.resolved = resolve_config(config, check_startup)
        self.servers: list[subprocess.Popen[bytes]] = []
        self.stopped = threading.Event()
        self.was_ready = False
        self.health = {str(port): False for port in self.ports}
        """Whether each port took requests at the last probe."""

    def run(self) -> int:
        """Run to the end; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        restarts = RestartCount(restart_policy())
        health = self._answer_health()
        try:
            while True:
                self.servers = [self._start(index) for index in range(len(self.ports))]
                ended = self._watch()
                self._end()
                if self.stopped.is_set():
                    return 0
                restart = restarts.after_death()
                log.error("%s; %s", ended, restart.text)
                if not self.was_ready or restart.delay is None:
                    return 1
                if self.stopped.wait(restart.delay):
                    return 0
        finally:
            if health is not None:
                health.should_exit = True

    def _stop(self, number: int, frame: FrameType | None) -> None:
        log.info("%s: shutting down", signal.Signals(number).name)
        self.stopped.set()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        payload = resolved_to_bytes(server_of(self.resolved, index))
        return start_child("quire.server.process.port_server", (os.getpid(),), payload)

    def _watch(self) -> str:
        """Wait until a server ends, and return how; or until a stop signal."""
        is_ready, probed = False, 0.0
        while not self.stopped.wait(LOOK_EVERY_S):
            for port, server in zip(self.ports, self.servers, strict=True):
                if server.poll() is not None:
                    return f"the server at port {port} {how_it_ended(server)}"
            if time.monotonic() - probed < PROBE_EVERY_S:
                continue
            self.health = {str(port): self.is_healthy(port) for port in self.ports}
            probed = time.monotonic()
            if not is_ready and all(self.health.values()):
                is_ready = self.was_ready = True
                show(f"\n{len(self.ports)} servers are ready, at the ports {self.ports[0]} to {self.ports[-1]}\n", sys.stdout)  # fmt: skip
        return ""

    def _end(self) -> None:
        """Drain the servers that still run; kill those that do not end. None of them takes new requests."""
        self.health = dict.fromkeys(self.health, False)
        until = time.monotonic() + self.config.server.shutdown_timeout + GRACE_S
        for server in self.servers:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
        for server in self.servers:
            wait_or_kill(server, max(0.0, until - time.monotonic()))

    # -- health ---------------------------------------------------------------------------------
    def is_healthy(self, port: int) -> bool:
        """Whether the server at this port takes requests."""
        host = LOOPBACK if self.host == "0.0.0.0" else self.host
        probe = http.client.HTTPConnection(host, port, timeout=PROBE_S)
        try:
            probe.request("GET", "/health")
            return probe.getresponse().status == HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            probe.close()

    def _answer_health(self) -> UvicornServer | None:
        """Answer GET /health at the supervisor's port: 200 if all servers are healthy."""
        server, port = self.config.server, self.config.server.data_parallel_supervisor_port
        if port is None:
            return None
        server = replace(server, port=port, disable_uvicorn_access_log=True)
        listener = bind(server, "--data-parallel-supervisor-port")
        listener.listen()
        made = http_server(Router([Route("/health", self._health)]), server)
        work = partial(asyncio.run, made.serve(sockets=[listener]))
        threading.Thread(target=work, name="health", daemon=True).start()
        return made

    async def _health(self, request: Request) -> Response:
        return json_response(self.health, 200 if all(self.health.values()) else 503)


def server_of(resolved: Resolved, index: int) -> Resolved:
    """The configuration of one of the servers."""
    config, parallel = resolved.config, resolved.config.parallel
    first = parallel.data_parallel_start_rank or 0
    own = replace(
        parallel,
        data_parallel_multi_port_external_lb=False,
        data_parallel_rank=first + index,
        data_parallel_start_rank=first,
    )
    server = replace(config.server, port=config.server.port + index, api_server_count=1)
    return replace(resolved, config=replace(config, parallel=own, server=server))
