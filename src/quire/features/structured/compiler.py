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
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from quire.errors import ConfigError
from quire.features.structured.grammar_messages import ProcessEnded
from quire.features.structured.grammar_process import Forkers, GrammarProcess
from quire.features.structured.refusal import Refused
from quire.features.structured.vocabulary import Vocabulary
from quire.protocol.structured_outputs import StructuredOutputsParams

KEPT = 32  # compiled grammars cached without rows: each is a process
KEPT_BYTES = 512 << 20  # their total memory; the least recently used are evicted first
KEPT_REFUSALS = 1024
THREADS = 2
QUICK_CPU_S = 0.25  # a normal schema takes 0.005 s, the largest accepted one about 0.15 s
SLOW_CPU_S = 2.0
SLOW_NICE = 15
MEMORY = 256 << 20  # of one grammar, without the shared vocabulary
XGRAMMAR_CPU_S = 15.0  # its compiler takes a hundred times as long
XGRAMMAR_MEMORY = 1 << 30

_Job = tuple[StructuredOutputsParams, "Future[GrammarProcess]"]


class GrammarCompiler:
    """Thread-safe."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.forkers = Forkers(vocabulary)
        self._xgrammar = Forkers(vocabulary, xgrammar=True)
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[bytes, Future[GrammarProcess]] = WeakValueDictionary()
        self._kept: OrderedDict[bytes, Future[GrammarProcess]] = OrderedDict()
        self._refused: OrderedDict[bytes, Future[GrammarProcess]] = OrderedDict()
        self.waiting: OrderedDict[bytes, _Job] = OrderedDict()
        """Jobs that have not started, by digest."""
        self.slow: OrderedDict[bytes, _Job] = OrderedDict()
        """Jobs that the quick lane gave up and the slow lane has not started."""
        self._running: dict[bytes, GrammarProcess] = {}
        self._at_work = 0
        self._slow_at_work = False
        self._pool = ThreadPoolExecutor(THREADS, "grammar-compile")
        self._first = ThreadPoolExecutor(1, "grammar-now")
        self._patient = ThreadPoolExecutor(1, "grammar-slow")

    def ask(self, constraint: StructuredOutputsParams, now: bool = False) -> Future[GrammarProcess]:
        """A future of the compiled grammar. `now`: compile it before all queued ones, because a step waits for it.

        Its result raises:
            Refused, ConfigError: it cannot be enforced, or not with this vocabulary.
        """
        key = digest(constraint)
        with self._lock:
            found = self._known.get(key)
            if found is not None and _ended(found):
                self._kept.pop(key, None)
                found = None
            if found is None:
                found = self._known[key] = Future()
                found.add_done_callback(partial(self._made, key))
                self.waiting[key] = constraint, found
                if not now and self._at_work < THREADS:
                    self._at_work += 1
                    self._pool.submit(self._work)
            elif found.done():
                self._keep(key, found)
            if now and (job := self.waiting.pop(key, None)) is not None:
                self._first.submit(self._make, key, job)
        return found

    def drop(self, constraint: StructuredOutputsParams) -> None:
        """Cancel a compile that no request waits for, even a running one."""
        key = digest(constraint)
        with self._lock:
            job = self.waiting.pop(key, None) or self.slow.pop(key, None)
            running = self._running.pop(key, None)
            if job is not None or running is not None:
                self._known.pop(key, None)
        if job is not None:
            job[1].cancel()
        if running is not None:
            running.close()

    # -- in the threads -------------------------------------------------------------------------
    def _work(self) -> None:
        """Compile the queued jobs until the queue is empty."""
        while True:
            with self._lock:
                if not self.waiting:
                    self._at_work -= 1
                    return
                key, job = self.waiting.popitem(last=False)
            self._make(key, job)

    def _work_slowly(self) -> None:
        while True:
            with self._lock:
                if not self.slow:
                    self._slow_at_work = False
                    return
                key, job = self.slow.popitem(last=False)
            self._make(key, job, slow=True)

    def _make(self, key: bytes, job: _Job, slow: bool = False) -> None:
        constraint, made = job
        try:
            made.set_result(self._compile(key, constraint, slow))
        except ProcessEnded:
            if slow or not self._to_slow_lane(key, job):
                made.set_exception(Refused(too_much(constraint)))
        except BaseException as error:  # the caller gets it from the future
            made.set_exception(error)

    def _to_slow_lane(self, key: bytes, job: _Job) -> bool:
        with self._lock:
            if self._known.get(key) is not job[1]:  # it was dropped
                return False
            self.slow[key] = job
            if not self._slow_at_work:
                self._slow_at_work = True
                self._patient.submit(self._work_slowly)
        return True

    def _compile(
        self, key: bytes, constraint: StructuredOutputsParams, slow: bool
    ) -> GrammarProcess:
        """Raises ProcessEnded: it exceeds the limits."""
        other = constraint.engine == "xgrammar"
        if other and not slow:
            raise ProcessEnded("xgrammar is slow")
        forkers = self._xgrammar if other else self.forkers
        try:
            process = forkers.fork()
        except ProcessEnded:  # the forker was killed: this starts a new one
            process = forkers.fork()
        with self._lock:
            self._running[key] = process
        quick, slowly, memory = QUICK_CPU_S, SLOW_CPU_S, MEMORY
        if other:
            slowly, memory = XGRAMMAR_CPU_S, XGRAMMAR_MEMORY
        try:
            process.compile(constraint, slowly if slow else quick, memory, SLOW_NICE * slow)
        finally:
            with self._lock:
                self._running.pop(key, None)
        return process

    # -- cache ----------------------------------------------------------------------------------
    def _made(self, key: bytes, made: Future[GrammarProcess]) -> None:
        with self._lock:
            if self._known.get(key) is made:
                self._keep(key, made)

    def _keep(self, key: bytes, made: Future[GrammarProcess]) -> None:
        if made.cancelled() or (error := made.exception()) is not None:
            if made.cancelled() or not isinstance(error, Refused | ConfigError):
                self._known.pop(key, None)  # it may succeed the next time
                return
            self._refused[key] = made
            self._refused.move_to_end(key)
            if len(self._refused) > KEPT_REFUSALS:
                self._refused.popitem(last=False)
            return
        self._kept[key] = made
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self.kept_bytes() > KEPT_BYTES):
            self._kept.popitem(last=False)

    def kept_bytes(self) -> int:
        """Memory of the cached grammars' processes."""
        return sum(made.result().bytes for made in self._kept.values())

    def warm(self, other: bool = False) -> None:
        """Prepare the vocabulary in the background; a large one takes a second.

        `other`: for xgrammar too, which takes five seconds more.
        """
        self._first.submit(self.forkers.start)
        if other:
            self._patient.submit(self._xgrammar.start)


def digest(constraint: StructuredOutputsParams) -> bytes:
    """A hash as the cache key of a constraint, whose text may have a MiB."""
    return hashlib.sha256(msgspec.msgpack.encode(constraint.key)).digest()


def _ended(made: Future[GrammarProcess]) -> bool:
    return made.done() and (
        made.cancelled() or (made.exception() is None and not made.result().alive)
    )


def too_much(constraint: StructuredOutputsParams) -> str:
    """The error message for a grammar whose compile exceeded the limits."""
    other = constraint.engine == "xgrammar"
    seconds = XGRAMMAR_CPU_S if other else SLOW_CPU_S
    memory = XGRAMMAR_MEMORY if other else MEMORY
    return (
        f"its grammar needs more than {seconds:g} s of processor time or {memory >> 20} MiB of memory to be"
        " compiled; make it smaller, or repeat less in it"
    )
