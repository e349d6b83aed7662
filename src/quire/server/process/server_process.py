"""One server process, from its start to its end.

    HTTP answers "loading" -> ready -> serving -> SIGTERM -> draining -> 0
              `-> could not start -> one report, 1   `-> the engine is dead -> 1

Knows signals and phases. Does not know routes or models. `launch.py` starts it, and so does each HTTP process of
several (`http_worker.py`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

from quire import env
from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient
from quire.errors import ConfigError, EngineDeadError, EngineDelayed, QuireError
from quire.frontend.startup import load_tokenizer
from quire.logging import get_logger
from quire.observe.processes import Processes
from quire.observe.prometheus import ServerMetrics
from quire.observe.stats_log import StatsLog
from quire.observe.tracing import Tracer
from quire.protocol.output import StartupStatus
from quire.server.api_keys import ApiKeys
from quire.server.app import build_app
from quire.server.host_header import allowed_hosts
from quire.server.journal import Journal
from quire.server.openai.journaled_responses import JournaledResponses
from quire.server.process import tls
from quire.server.process.banner import failure, greet
from quire.server.process.inline_engine import InlineEngineLoader
from quire.server.process.sockets import address, http_server
from quire.server.state import ServerPhase, ServerState
from quire.terminal import show

log = get_logger(__name__)

LOOK_EVERY_S = 0.25
ABORTED_S = 5.0  # limit for the engine to end aborted requests
DEATH_NOTICE_S = 1.0  # time for clients to read the error before the process ends


def event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class ServerProcess:
    """One server process, from its start to its end."""

    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)

    def __init__(
        self,
        config: EngineConfig,
        listener: socket,
        client: EngineClient | None,
        tenants: ApiKeys,
        shared: str | None = None,
        processes: Processes | None = None,
        tracer: Tracer | None = None,
    ):
        self.config, self.listener, self.tenants = config, listener, tenants
        self.client = client
        self.is_primary, self.logs_stats = True, not config.observe.disable_log_stats
        observe = config.observe
        metrics = ServerMetrics(
            config.model.served_names[0],
            legacy=observe.legacy_metrics,
            shared=shared,
            custom=observe.custom_histogram_buckets,
            processes=processes,
        )
        self.state = ServerState(config, metrics, tenants=tenants, tracer=tracer)
        self.state.dev_mode = bool(env.get("SERVER_DEV_MODE"))
        self.state.startup = self._startup
        self.state.hosts = allowed_hosts(config.server, listener)
        if (folder := config.server.journal_dir) is not None:
            journal = Journal(
                Path(folder).expanduser(), int(config.server.journal_size * (1 << 30))
            )
            self.state.journal = JournaledResponses(journal)
        self.app = build_app(self.state)
        self.http = http_server(self.app, config.server)
        self.loading = InlineEngineLoader()
        self.stopping, self.opened = asyncio.Event(), asyncio.Event()
        self.opened.set()  # it answers from the beginning, with 503 while it loads
        self._tasks: set[asyncio.Future[Any]] = set()  # prevents their garbage collection
        self.url = address(config.server, listener)

    async def run(self) -> int:
        """Run to the end; the exit status."""
        loop = asyncio.get_running_loop()
        for number in self.stop_signals:
            loop.add_signal_handler(number, self.stop, number)
        if self.tenants.path is not None:
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        elif closes_with_terminal():
            loop.add_signal_handler(signal.SIGHUP, self.stop, signal.SIGHUP)
        http = asyncio.ensure_future(self._answer())
        try:
            code = await self._run_phases(http)
        finally:
            self.http.should_exit = True
            self.opened.set()
            with suppress(asyncio.CancelledError):
                await http
            if self.state.tracer is not None:
                await asyncio.to_thread(self.state.tracer.close)
            if self.client is not None:
                # In its own thread: the loop's threads may all wait for the engine, which this call ends.
                with ThreadPoolExecutor(1, "close") as own:
                    await loop.run_in_executor(own, self.client.close)
        return code

    async def _answer(self) -> None:
        await self.opened.wait()
        if self.config.server.enable_ssl_refresh:
            context = partial(getattr, self.http.config, "ssl", None)
            self._soon(tls.keep_fresh(context, self.config.server))
        await self.http.serve(sockets=[self.listener])

    def stop(self, number: int) -> None:
        """The first signal drains the server, the second one aborts running requests."""
        if self.stopping.is_set():
            log.warning("second signal: not waiting for running requests")
            self.http.force_exit = True
            for name in list(self.state.active):
                self._abort_soon(name)
            self.state.hurry = True
            return
        log.info("%s: shutting down", signal.Signals(number).name)
        if self.state.phase in (ServerPhase.READY, ServerPhase.LOADING):
            self.state.phase = ServerPhase.DRAINING
        self.stopping.set()

    def reload(self) -> None:
        """Read the key file again, at SIGHUP."""
        tenants = self.tenants
        try:
            tenants.reload()
        except ConfigError as error:
            log.error("SIGHUP: the keys are unchanged: %s", error)
            return
        log.info("SIGHUP: read %d keys from %s", len(tenants.weights), tenants.path)
        if self.state.engine is not None:
            self._soon(self.state.engine.call("set_weights", tenants.weights))

    async def _run_phases(self, http: asyncio.Future[None]) -> int:
        stopped = asyncio.ensure_future(self.stopping.wait())
        starting = asyncio.ensure_future(self._start())
        await first_of(stopped, starting, http)
        if not starting.done():  # stop signal while loading, or HTTP ended
            starting.cancel()
            return 0 if stopped.done() else 1
        try:
            starting.result()
        except Exception as error:
            if not isinstance(error, QuireError | OSError):  # a bug: log its traceback
                log.exception("the start failed")
            self._report(error)
            return 1
        if self.state.engine is None:
            return 0  # stop signal at the end of loading
        watch = asyncio.ensure_future(self._watch())
        await first_of(stopped, watch, http)
        if watch.done():
            watch.result()
            await asyncio.sleep(DEATH_NOTICE_S)
            return 1
        code = 0 if stopped.done() else 1
        watch.cancel()
        await self._drain()
        return code

    def _startup(self) -> StartupStatus:
        return self.loading.status if self.client is None else self.client.state().startup

    def _report(self, error: Exception) -> None:
        show(failure(error), sys.stderr)

    async def _connected(self, engine: AsyncEngine) -> None:
        """For subclasses: the engine's outputs are received from now on."""

    async def _start(self) -> None:
        """Wait until the model is loaded.

        Raises:
            StartupError, QuireError: it could not be loaded.
        """
        state = self.state
        if state.journal is not None:
            await asyncio.to_thread(state.journal.open, asyncio.get_running_loop())
        if (client := self.client) is None:
            client, tokenizer = await self.loading.start(self.config)
            self.client = client
        else:  # while the engine loads
            tokenizer = await asyncio.to_thread(load_tokenizer, client.resolved)
        await asyncio.to_thread(client.wait_ready, float(env.get("ENGINE_READY_TIMEOUT_S")))
        engine = await asyncio.to_thread(AsyncEngine, client, self.config, tokenizer)
        await engine.listen()
        await self._connected(engine)
        if state.phase is not ServerPhase.LOADING:
            return  # stop signal while it loaded
        for name, seconds in client.ready.startup:
            state.metrics.startup.labels(name).set(seconds)
        engine.front.formats.log_choices()
        state.attach(engine)
        if state.journal is not None:
            state.journal.restore(state, self.app)
        self._greet(engine)

    def _greet(self, engine: AsyncEngine) -> None:
        total = greet(self.config, engine.client.ready, self.url, engine.front.has_chat_template)
        self.state.metrics.startup.labels("all").set(total)

    async def _watch(self) -> None:
        """Wait until the engine is dead; log statistics at intervals."""
        state, observe = self.state, self.config.observe
        engine = state.engine
        if engine is None or self.client is None:
            return
        logs = stats_logs(self.client)
        every = observe.log_stats_interval
        before = time.monotonic()
        epoch = self.client.epoch
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                engine.check()
            except EngineDeadError as error:
                if state.phase is not ServerPhase.DEAD:
                    state.phase = ServerPhase.DEAD
                log.error("the engine has stopped: %s", error)
                if not env.get("KEEP_ALIVE_ON_ENGINE_DEATH"):
                    return
                await self.stopping.wait()
            except EngineDelayed:
                pass  # its supervisor logs this, and restarts it later
            if (new := self.client.epoch) > epoch and self.is_primary:
                state.metrics.replaced("engine", new - epoch)
            epoch = new
            now = time.monotonic()
            if every and now - before >= every:
                for stats in logs:
                    stats.tick(now - before, write=self.logs_stats)
                    state.metrics.rates(stats.prompt, stats.generation, stats.engine)
                before = now

    async def _drain(self) -> None:
        """Wait for running requests, then abort those that are left."""
        state, patience = self.state, self.config.server.shutdown_timeout
        if state.active:
            log.info(
                "waiting up to %g s for %d running requests to end; press Ctrl-C again to stop now",
                patience,
                len(state.active),
            )
        await self._until_idle(patience)
        if state.journal is not None:
            await asyncio.to_thread(state.journal.close)  # the next server finishes what is left
        for name in list(state.active):
            self._abort_soon(name)
        await self._until_idle(ABORTED_S, hurried=False)

    async def _until_idle(self, seconds: float, hurried: bool = True) -> None:
        end = time.monotonic() + seconds
        while self.state.active and time.monotonic() < end:
            if hurried and self.state.hurry:
                return
            await asyncio.sleep(0.02)

    def _abort_soon(self, name: str) -> None:
        self._soon(self.state.abort(name))

    def _soon(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call to the engine failed: %s", error)


def stats_logs(client: EngineClient) -> list[StatsLog]:
    """One for each engine."""
    device, numbers = client.ready.device.upper(), client.resolved.config.parallel.ranks
    return [
        StatsLog(one.stats, device=device, engine=number)
        for number, one in zip(numbers, client.engines, strict=True)
    ]


def closes_with_terminal() -> bool:
    """Whether SIGHUP ends this process if there is no key file to read again; under nohup it does not."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
