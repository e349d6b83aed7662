"""The gate: a request waits until its grammar is compiled, and holds up nobody meanwhile.

Knows waiting requests and a compiler. Does not know rows or tokens. A grammar that cannot be compiled lets its
request through: it fails alone, on the worker, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, ref

import msgspec
from msgspec import Struct

from quire.features.structured.compiler import GrammarCompiler
from quire.protocol.plan import StepPlan
from quire.protocol.structured_outputs import StructuredOutputsParams
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

if TYPE_CHECKING:
    from quire.features.structured.grammar_process import GrammarProcess

NAME = "structured"

_Key = tuple[object, ...]


class GrammarGate(Gate):
    """`wake` is called from a thread when a grammar is ready: the loop may be asleep.

    With the worker `elsewhere`, in a process with a compiler of its own, plans tell it what is being compiled here, so
    that both are done when the request enters.
    """

    name = NAME

    def __init__(
        self,
        compiler: GrammarCompiler,
        wake: Callable[[], None] | None = None,
        elsewhere: bool = False,
    ):
        self.compiler, self.wake, self.elsewhere = compiler, wake, elsewhere
        self._wanted: dict[_Key, StructuredOutputsParams] = {}
        self._dropped: dict[_Key, StructuredOutputsParams] = {}
        self._asked: WeakKeyDictionary[Request, ref[Future[GrammarProcess]]] = WeakKeyDictionary()
        self._askers: WeakKeyDictionary[Future[GrammarProcess], int] = WeakKeyDictionary()
        self._ready: WeakSet[Request] = WeakSet()

    def ready(self, request: Request) -> bool:
        """It asks once for each: what was compiled for one may be forgotten by the time the last was asked for, and
        whoever asks again would wait again."""
        if (constraint := request.params.structured_outputs) is None or request in self._ready:
            return True
        if request not in self._asked:
            compiled = self.compiler.ask(constraint)
            self._asked[request] = ref(compiled)
            if compiled.done():
                self._ready.add(request)
                return True
            self._askers[compiled] = others = self._askers.get(compiled, 0) + 1
            if self.elsewhere and others == 1:
                self._wanted[constraint.key] = constraint
            # Whoever else asked for it: the worker, which compiles a spent grammar anew, wakes nobody.
            compiled.add_done_callback(partial(self._done, ref(request)))
        return request in self._ready

    def holds(self, request: Request) -> bool:
        return request in self._asked and request not in self._ready

    def gave_up(self, request: Request) -> None:
        """What nobody else waits for is not compiled; a compile that has begun is ended."""
        constraint, asked = request.params.structured_outputs, self._asked.pop(request, None)
        compiled = None if asked is None else asked()
        if constraint is None or compiled is None or compiled.done():
            return
        self._askers[compiled] -= 1
        if not self._askers[compiled]:
            self.compiler.drop(constraint)
            if self.elsewhere and self._wanted.pop(constraint.key, None) is None:
                self._dropped[constraint.key] = constraint

    def leave(self, request: Request) -> None:
        """It may come back much later."""
        self._asked.pop(request, None)
        self._ready.discard(request)

    def _done(self, asker: ref[Request], _: Future[GrammarProcess]) -> None:
        if (request := asker()) is not None:
            self._ready.add(request)
        if self.wake is not None:
            self.wake()

    def extra(self, plan: StepPlan) -> bytes | None:
        if not (self._wanted or self._dropped):
            return None
        told = CompileRequests(list(self._wanted.values()), list(self._dropped.values()))
        self._wanted, self._dropped = {}, {}
        return msgspec.msgpack.encode(told)


class CompileRequests(Struct, array_like=True):
    """What a compiler elsewhere is to begin, after it has dropped what nobody waits for."""

    wanted: list[StructuredOutputsParams]
    dropped: list[StructuredOutputsParams]


def apply_compile_requests(compiler: GrammarCompiler, extra: bytes) -> None:
    """Do what `GrammarGate.extra` said."""
    told = msgspec.msgpack.decode(extra, type=CompileRequests)
    for constraint in told.dropped:
        compiler.drop(constraint)
    for constraint in told.wanted:
        compiler.ask(constraint)
