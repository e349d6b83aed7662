"""One of several HTTP processes: `python -m quire.server.process.http_worker NUMBER COUNT LISTENER STATUS PARENT AGAIN
BOARD... FOLDER...`, with a board and a folder of each engine.

Reads its configuration from stdin; inherits its socket and a status pipe. Knows how to be a child process: it reports
to the supervisor (`http_supervisor.py`) that it is open, alive, or why it failed; it ends on STOP, and with its parent.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from socket import socket

from quire import env
from quire.api.async_engine import AsyncEngine
from quire.config.engine import Resolved
from quire.config.serialize import resolved_from_bytes
from quire.engine.client import EngineClient
from quire.engine.engine_launcher import EnginePlace, connect
from quire.engine.engine_state import StateBoard
from quire.errors import EngineDeadError, StartupError
from quire.logging import configure
from quire.observe.process_memory import process_tree
from quire.observe.tracing import tracer_of
from quire.plugins import load_plugins
from quire.processes.child import STOP, begin_child, exit_child
from quire.processes.status_pipe import StatusWriter
from quire.protocol.output import EngineDied, EngineOpen, Heartbeat
from quire.server.api_keys import ApiKeys
from quire.server.process.server_process import ServerProcess, event_loop
from quire.server.shared_usage import UsageLedger
from quire.startup_timer import since_process_start

KEYS = "keys"  # a folder in the engine's folder
MODULE = "quire.server.process.http_worker"
BEAT_S = 1.0


class HttpWorker(ServerProcess):
    """A server that reports to its supervisor instead of the terminal."""

    stop_signals = (STOP,)

    def __init__(
        self,
        resolved: Resolved,
        listener: socket,
        client: EngineClient,
        status: StatusWriter,
        ledger: UsageLedger,
        is_replacement: bool,
    ):
        config = resolved.config
        shared = env.outer("PROMETHEUS_MULTIPROC_DIR")
        tenants, tracer = ApiKeys(config.server, ledger=ledger), tracer_of(config)
        super().__init__(config, listener, client, tenants, shared, processes, tracer)
        self.status, self.is_replacement = status, is_replacement
        if is_replacement:  # new connections may wait: the other processes serve
            self.opened.clear()
        self.state.front, self.state.fronts = ledger.front, ledger.fronts
        self.is_primary = ledger.front == 0
        self.logs_stats = False  # the supervisor does

    async def run(self) -> int:
        beating = asyncio.ensure_future(self._beat())
        try:
            return await super().run()
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        """Heartbeats from the serving loop: if it hangs, they stop."""
        while True:
            await asyncio.sleep(BEAT_S)
            self.status.send(Heartbeat(0, 0.0, 0.0))

    async def _connected(self, engine: AsyncEngine) -> None:
        """Fetch the statistics: the engine sends them only when they change."""
        await asyncio.to_thread(engine.client.stats, fresh=True)

    def _greet(self, engine: AsyncEngine) -> None:
        if self.is_replacement:
            self.state.metrics.replaced("http")
        else:
            seconds = since_process_start(os.getppid())
            self.state.metrics.startup.labels("all").set(seconds)
        self.opened.set()
        self.status.send(EngineOpen(engine.front.has_chat_template))

    def _report(self, error: Exception) -> None:
        detail = error.detail if isinstance(error, StartupError) else ""
        self.status.send(EngineDied(str(error), detail or ""))


def processes() -> dict[int, str]:
    """The processes of this server that last: pid -> name. Helpers, such as grammar processes, have no metrics."""
    supervisor = os.getppid()
    names: dict[int, str] = {supervisor: "server"}
    for pid in process_tree(supervisor):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            if (name := name_of(words)) is not None:
                names[pid] = name
    return numbered(names)


def numbered(names: Mapping[int, str]) -> dict[int, str]:
    """The same, with numbers after names that several processes have."""
    counts, seen = Counter(names.values()), Counter[str]()
    numbers = {}
    for pid, name in sorted(names.items()):
        numbers[pid] = name if counts[name] == 1 else f"{name} {seen[name]}"
        seen[name] += 1
    return numbers


def name_of(words: list[str]) -> str | None:
    """server 0, server 1, ...; engine; worker; None: another process."""
    if MODULE in words:
        return f"server {words[words.index(MODULE) + 1]}"
    if "quire.engine.engine_main" in words:
        return "engine"
    return "worker" if "quire.executor.worker_main" in words else None


def main(words: list[str]) -> int:
    number, count, listener, status_fd, parent, again = map(int, words[:6])
    boards, folders = words[6 : 6 + len(words[6:]) // 2], words[6 + len(words[6:]) // 2 :]
    begin_child(f"server {number}", parent)
    resolved = resolved_from_bytes(sys.stdin.buffer.read())
    configure(f"server {number}", resolved.config.observe.log_level)
    if resolved.config.lora.enable_lora:
        load_plugins()  # they may register resolvers of adapters
    status = StatusWriter(status_fd)
    places = [
        EnginePlace(Path(folder), StateBoard(int(board)))
        for board, folder in zip(boards, folders, strict=True)
    ]
    client = connect(resolved, places, number, count)
    with asyncio.Runner(loop_factory=event_loop()) as runner, socket(fileno=listener) as own:
        ledger = UsageLedger(places[0].folder / KEYS, number, count)
        front = HttpWorker(resolved, own, client, status, ledger, bool(again))
        try:
            return runner.run(front.run())
        except EngineDeadError:
            return 1


if __name__ == "__main__":
    exit_child(main(sys.argv[1:]))
