"""Compiled grammars: made in threads, kept, handed out as fresh matchers.

Knows constraints and a vocabulary. Does not know rows, requests or logits. A compiled grammar is a matcher that
has read nothing; a request gets a copy of it, which costs microseconds. Copies share what the lexer has learned, and
the limits on that: what many requests have used up must not be held against the next, so a grammar that has reached
them is compiled anew (`forget`).

What is still to be compiled is never dropped, however many ask, while somebody waits for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from llguidance import LLMatcher

from quire.features.structured.grammar import explained, grammar_of, limits
from quire.features.structured.refusal import Refused, is_panic
from quire.features.structured.vocabulary import Vocabulary
from quire.protocol.constraint import StructuredOutputsParams

if TYPE_CHECKING:
    from quire.features.structured.xgrammar import XCompiler, XMatcher

    Matcher = LLMatcher | XMatcher
    _Job = tuple[StructuredOutputsParams, Future[Matcher]]

KEPT = 64  # compiled grammars, least recently used go first; each may grow to some ten MB (grammar.limits)
THREADS = 2


class Compiler:
    """May be used from any thread."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[tuple[object, ...], Future[Matcher]] = (
            WeakValueDictionary()
        )
        self._kept: OrderedDict[tuple[object, ...], Future[Matcher]] = OrderedDict()
        self._making = threading.Lock()
        self._xgrammar: XCompiler | None = None
        self.waiting: OrderedDict[tuple[object, ...], _Job] = OrderedDict()
        """What is not begun, by what it is known as."""
        self._at_work = 0
        self._pool = ThreadPoolExecutor(THREADS, "grammar-compile")
        self._first = ThreadPoolExecutor(1, "grammar-now")

    def ask(self, constraint: StructuredOutputsParams, now: bool = False) -> Future[Matcher]:
        """The compiled grammar, some time; `now`: before all that waits, because a step waits for it.

        Its result is to be copied, and raises:
            Refused, ConfigError: it cannot be enforced, or not with this vocabulary.
        """
        key = constraint.key
        with self._lock:
            found = self._known.get(key)
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
                self._first.submit(self._make, job)
        return found

    def drop(self, constraint: StructuredOutputsParams) -> None:
        """Nobody waits for it any more: it is not compiled, unless that has begun."""
        with self._lock:
            if (job := self.waiting.pop(constraint.key, None)) is None:
                return
            del self._known[constraint.key]
        job[1].cancel()

    def _work(self) -> None:
        """Compile what waits, until nothing does."""
        while True:
            with self._lock:
                if not self.waiting:
                    self._at_work -= 1
                    return
                _, job = self.waiting.popitem(last=False)
            self._make(job)

    def _make(self, job: _Job) -> None:
        constraint, made = job
        made.set_running_or_notify_cancel()
        try:
            made.set_result(self._compile(constraint))
        except BaseException as error:  # it is told to whoever asked
            made.set_exception(error)

    def _made(self, key: tuple[object, ...], made: Future[Matcher]) -> None:
        with self._lock:
            if self._known.get(key) is made:
                self._keep(key, made)

    def _keep(self, key: tuple[object, ...], made: Future[Matcher]) -> None:
        self._kept[key] = made
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def forget(self, constraint: StructuredOutputsParams, spent: Future[Matcher]) -> None:
        """Compile it anew for whoever asks next, unless that has been done since `spent`."""
        with self._lock:
            if self._known.get(constraint.key) is spent:
                del self._known[constraint.key]
                self._kept.pop(constraint.key, None)

    def _compile(self, constraint: StructuredOutputsParams) -> Matcher:
        if constraint.engine == "xgrammar":
            return self._other().compile(constraint)
        try:
            text = grammar_of(constraint, self.vocabulary.specials)
            made = LLMatcher(self.vocabulary.tokenizer, text, log_level=0, limits=limits())
        except BaseException as error:
            if is_panic(error):
                raise Refused(f"llguidance fails on it: {error}") from None
            raise
        if made.is_error():
            raise Refused(explained(made.get_error()))
        return made

    def _other(self) -> XCompiler:
        from quire.features.structured.xgrammar import XCompiler

        with self._making:
            if self._xgrammar is None:
                self._xgrammar = XCompiler(self.vocabulary)
            return self._xgrammar

    def warm(self, other: bool = False) -> None:
        """Prepare the vocabulary in the background. It takes a second of a large one, and holds the GIL.

        `other`: for xgrammar too, which takes five more.
        """
        self._pool.submit(lambda: self.vocabulary.tokenizer)
        if other:
            self._pool.submit(self._other)
