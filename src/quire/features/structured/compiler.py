"""Grammar compiler: compiles each grammar in a process of its own and caches the processes.

Knows constraints, processes, threads and limits. Does not know rows, requests or logits. A compile includes the
grammar's first mask, so both are within the limits before a row uses the grammar. Rows with the same grammar share its
process.

    quick lane   every grammar gets QUICK_CPU_S of processor time here, which is enough for any normal one
    slow lane    a grammar that needs more starts again here, one at a time with low priority, and gets SLOW_CPU_S

So only slow grammars wait for slow grammars. A queued compile is never evicted while a request waits for it.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from quire.errors import ConfigError
from quire.features.structured.errors import UnsupportedConstraint
from quire.features.structured.grammar_process import GrammarForkServer, GrammarProcess
from quire.features.structured.vocabulary import Vocabulary
from quire.processes.isolated_child import ProcessEnded
from quire.protocol.structured_outputs import StructuredOutputsParams

MAX_CACHED = 32  # compiled grammars cached without rows: each is a process
MAX_CACHED_BYTES = 512 << 20  # their total memory; the least recently used are evicted first
IDLE_S = 60.0  # a cached grammar ends if no request has come for it since
MAX_CACHED_ERRORS = 1024
THREADS = 2
QUICK_CPU_S = 0.25  # a normal schema takes 0.005 s, the largest accepted one about 0.15 s
SLOW_CPU_S = 2.0
SLOW_NICE = 15
MEMORY = 256 << 20  # of one grammar, without the shared vocabulary
TOO_LARGE = (
    f"its grammar needs more than {SLOW_CPU_S:g} s of processor time or {MEMORY >> 20} MiB of memory to compile;"
    " make it smaller, or use fewer repetitions"
)

_Job = tuple[StructuredOutputsParams, "Future[GrammarProcess]"]


class CompileLane:
    """Jobs that threads of one pool compile in order."""

    def __init__(self, threads: int, slow: bool):
        self.threads, self.slow, self.at_work = threads, slow, 0
        self.pool = ThreadPoolExecutor(threads, "grammar-slow" if slow else "grammar-compile")
        self.waiting: OrderedDict[bytes, _Job] = OrderedDict()
        """Jobs that have not started, by digest."""


class GrammarCompiler:
    """Thread-safe."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.fork_server = GrammarForkServer(vocabulary)
        self._lock = threading.Lock()
        self._futures: WeakValueDictionary[bytes, Future[GrammarProcess]] = WeakValueDictionary()
        self._cached: OrderedDict[bytes, Future[GrammarProcess]] = OrderedDict()
        self._used_at: dict[bytes, float] = {}
        """By digest of a cached grammar, when the last request came for it."""
        self._idle_timer: threading.Timer | None = None
        self._errors: OrderedDict[bytes, Future[GrammarProcess]] = OrderedDict()
        self.quick, self.slow = CompileLane(THREADS, False), CompileLane(1, True)
        self._running: dict[bytes, GrammarProcess] = {}
        self._urgent_pool = ThreadPoolExecutor(1, "grammar-now")

    def submit(
        self, constraint: StructuredOutputsParams, now: bool = False
    ) -> Future[GrammarProcess]:
        """A future of the compiled grammar. `now`: compile it before all queued ones, because a step waits for it.

        Its result raises:
            UnsupportedConstraint, ConfigError: it cannot be enforced, or not with this vocabulary.
        """
        key = digest(constraint)
        with self._lock:
            future = self._futures.get(key)
            if future is not None and _has_ended(future):
                self._evict(key)
                future = None
            if future is None:
                future = self._futures[key] = Future()
                future.add_done_callback(partial(self._on_done, key))
                self._queue(self.quick, key, (constraint, future), start=not now)
            elif future.done():
                self._keep(key, future)
            if now and (job := self.quick.waiting.pop(key, None)) is not None:
                self._urgent_pool.submit(self._run, key, job)
        return future

    def cancel(self, constraint: StructuredOutputsParams) -> None:
        """Cancel a compile that no request waits for, even a running one."""
        key = digest(constraint)
        with self._lock:
            job = self.quick.waiting.pop(key, None) or self.slow.waiting.pop(key, None)
            running = self._running.pop(key, None)
            if job is not None or running is not None:
                self._futures.pop(key, None)
        if job is not None:
            job[1].cancel()
        if running is not None:
            running.close()

    def _queue(self, lane: CompileLane, key: bytes, job: _Job, start: bool = True) -> None:
        lane.waiting[key] = job
        if start and lane.at_work < lane.threads:
            lane.at_work += 1
            lane.pool.submit(self._work, lane)

    # -- in the threads -------------------------------------------------------------------------
    def _work(self, lane: CompileLane) -> None:
        """Compile the jobs of a lane until none waits."""
        while True:
            with self._lock:
                if not lane.waiting:
                    lane.at_work -= 1
                    return
                key, job = lane.waiting.popitem(last=False)
            self._run(key, job, lane.slow)

    def _run(self, key: bytes, job: _Job, slow: bool = False) -> None:
        constraint, future = job
        try:
            future.set_result(self._compile(key, constraint, slow))
        except ProcessEnded:
            if slow or not self._to_slow_lane(key, job):
                future.set_exception(UnsupportedConstraint(TOO_LARGE))
        except BaseException as error:  # the caller gets it from the future
            future.set_exception(error)
        if self.fork_server.close is not None:
            self.fork_server.fork_spare()

    def _to_slow_lane(self, key: bytes, job: _Job) -> bool:
        with self._lock:
            if self._futures.get(key) is not job[1]:  # it was dropped
                return False
            self._queue(self.slow, key, job)
        return True

    def _compile(
        self, key: bytes, constraint: StructuredOutputsParams, slow: bool
    ) -> GrammarProcess:
        """The process of a grammar. Raises ProcessEnded: it exceeds the limits; CompileDelayed: the machine is too busy."""
        process = self.fork_server.fork()
        with self._lock:
            self._running[key] = process
        cpu_s, nice = (SLOW_CPU_S, SLOW_NICE) if slow else (QUICK_CPU_S, 0)
        try:
            process.compile(constraint, cpu_s, MEMORY, nice)
        finally:
            with self._lock:
                self._running.pop(key, None)
        return process

    # -- cache ----------------------------------------------------------------------------------
    def _on_done(self, key: bytes, future: Future[GrammarProcess]) -> None:
        with self._lock:
            if self._futures.get(key) is future:
                self._keep(key, future)

    def _keep(self, key: bytes, future: Future[GrammarProcess]) -> None:
        if future.cancelled() or (error := future.exception()) is not None:
            if future.cancelled() or not isinstance(error, UnsupportedConstraint | ConfigError):
                self._futures.pop(key, None)  # it may succeed the next time
                return
            self._errors[key] = future
            self._errors.move_to_end(key)
            if len(self._errors) > MAX_CACHED_ERRORS:
                self._errors.popitem(last=False)
            return
        self._cached[key], self._used_at[key] = future, time.monotonic()
        self._cached.move_to_end(key)
        self._watch_idle()
        while len(self._cached) > 1 and (
            len(self._cached) > MAX_CACHED or self.cached_bytes() > MAX_CACHED_BYTES
        ):
            self._evict(next(iter(self._cached)))

    def _evict(self, key: bytes) -> None:
        """Its process ends when no row uses it any more."""
        self._cached.pop(key, None)
        self._used_at.pop(key, None)

    def _watch_idle(self) -> None:
        if self._cached and self._idle_timer is None:
            wait = self._used_at[next(iter(self._cached))] + IDLE_S - time.monotonic()
            self._idle_timer = threading.Timer(max(0.0, wait), end_idle, [weakref.ref(self)])
            self._idle_timer.daemon = True
            self._idle_timer.start()

    def end_idle(self) -> None:
        """Evict the grammars that no request came for in the last IDLE_S."""
        with self._lock:
            self._idle_timer = None
            limit = time.monotonic() - IDLE_S
            for key in [key for key, used_at in self._used_at.items() if used_at <= limit]:
                self._evict(key)
            self._watch_idle()

    def cached_bytes(self) -> int:
        """Memory of the cached grammars' processes."""
        return sum(future.result().bytes for future in self._cached.values())

    def warm(self) -> None:
        """Prepare the vocabulary in the background; a large one takes a second."""
        self._urgent_pool.submit(self.fork_server.fork_spare)


def end_idle(compiler: weakref.ref[GrammarCompiler]) -> None:
    """In a timer's thread, which keeps no compiler alive."""
    if (alive := compiler()) is not None:
        alive.end_idle()


def digest(constraint: StructuredOutputsParams) -> bytes:
    """A hash as the cache key of a constraint, whose text may have a MiB."""
    return hashlib.sha256(msgspec.msgpack.encode(constraint.key)).digest()


def _has_ended(future: Future[GrammarProcess]) -> bool:
    return future.done() and (
        future.cancelled() or (future.exception() is None and not future.result().alive)
    )
