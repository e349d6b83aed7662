"""Compiled grammars: each made in a process of its own, kept, and given to the rows that follow it.

Knows constraints, processes, threads and limits. Does not know rows, requests or logits. A grammar has shown its first
mask within the limits before a request with it is admitted. Rows with the same grammar share its process.

    quick lane   every grammar has QUICK_CPU_S of processor time here, which is plenty for an honest one
    slow lane    what needs more begins anew here, one at a time and with low priority, and has SLOW_CPU_S

So nobody waits behind a grammar that takes long, but others that take long. What is still to be compiled is never
dropped, however many ask, while somebody waits for it.
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

KEPT = 32  # compiled grammars that no row may follow: each is a process
KEPT_BYTES = 512 << 20  # of memory that they take together; the least recently used go first
KEPT_REFUSALS = 1024
THREADS = 2
QUICK_CPU_S = 0.25  # an honest schema takes 0.005 s, the largest that is taken about 0.15 s
SLOW_CPU_S = 2.0
SLOW_NICE = 15
MEMORY = 256 << 20  # of one grammar, above the vocabulary that all share
XGRAMMAR_CPU_S = 15.0  # its compiler takes a hundred times as long
XGRAMMAR_MEMORY = 1 << 30

_Job = tuple[StructuredOutputsParams, "Future[GrammarProcess]"]


class GrammarCompiler:
    """May be used from any thread."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.forkers = Forkers(vocabulary)
        self._xgrammar = Forkers(vocabulary, xgrammar=True)
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[bytes, Future[GrammarProcess]] = WeakValueDictionary()
        self._kept: OrderedDict[bytes, Future[GrammarProcess]] = OrderedDict()
        self._refused: OrderedDict[bytes, Future[GrammarProcess]] = OrderedDict()
        self.waiting: OrderedDict[bytes, _Job] = OrderedDict()
        """What is not begun, by its digest."""
        self.slow: OrderedDict[bytes, _Job] = OrderedDict()
        """What the quick lane has given up, and the slow lane has not begun."""
        self._running: dict[bytes, GrammarProcess] = {}
        self._at_work = 0
        self._slow_at_work = False
        self._pool = ThreadPoolExecutor(THREADS, "grammar-compile")
        self._first = ThreadPoolExecutor(1, "grammar-now")
        self._patient = ThreadPoolExecutor(1, "grammar-slow")

    def ask(self, constraint: StructuredOutputsParams, now: bool = False) -> Future[GrammarProcess]:
        """The compiled grammar, some time; `now`: before all that waits, because a step waits for it.

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
        """Nobody waits for it any more: it is not compiled, and a compile that has begun is ended."""
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
        """Compile what waits, until nothing does."""
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
        except BaseException as error:  # it is told to whoever asked
            made.set_exception(error)

    def _to_slow_lane(self, key: bytes, job: _Job) -> bool:
        with self._lock:
            if self._known.get(key) is not job[1]:  # nobody waits for it any more
                return False
            self.slow[key] = job
            if not self._slow_at_work:
                self._slow_at_work = True
                self._patient.submit(self._work_slowly)
        return True

    def _compile(
        self, key: bytes, constraint: StructuredOutputsParams, slow: bool
    ) -> GrammarProcess:
        """Raises ProcessEnded: it takes too much."""
        other = constraint.engine == "xgrammar"
        if other and not slow:
            raise ProcessEnded("xgrammar is slow")
        forkers = self._xgrammar if other else self.forkers
        try:
            process = forkers.fork()
        except ProcessEnded:  # somebody has ended the forker: there is a new one
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

    # -- what is kept ---------------------------------------------------------------------------
    def _made(self, key: bytes, made: Future[GrammarProcess]) -> None:
        with self._lock:
            if self._known.get(key) is made:
                self._keep(key, made)

    def _keep(self, key: bytes, made: Future[GrammarProcess]) -> None:
        if made.cancelled() or (error := made.exception()) is not None:
            if made.cancelled() or not isinstance(error, Refused | ConfigError):
                self._known.pop(key, None)  # it may go better the next time
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
        """Memory of the kept grammars' processes."""
        return sum(made.result().bytes for made in self._kept.values())

    def warm(self, other: bool = False) -> None:
        """Prepare the vocabulary in the background. It takes a second of a large one.

        `other`: for xgrammar too, which takes five more.
        """
        self._first.submit(self.forkers.start)
        if other:
            self._patient.submit(self._xgrammar.start)


def digest(constraint: StructuredOutputsParams) -> bytes:
    """What a constraint is known as: its text may have a MiB."""
    return hashlib.sha256(msgspec.msgpack.encode(constraint.key)).digest()


def _ended(made: Future[GrammarProcess]) -> bool:
    return made.done() and (
        made.cancelled() or (made.exception() is None and not made.result().alive)
    )


def too_much(constraint: StructuredOutputsParams) -> str:
    """What is said of a grammar that was ended."""
    other = constraint.engine == "xgrammar"
    seconds = XGRAMMAR_CPU_S if other else SLOW_CPU_S
    memory = XGRAMMAR_MEMORY if other else MEMORY
    return (
        f"its grammar needs more than {seconds:g} s of processor time or {memory >> 20} MiB of memory to be"
        " compiled; make it smaller, or repeat less in it"
    )
