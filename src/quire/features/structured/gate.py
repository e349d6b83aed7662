"""Grammar gate: a request waits until its grammar is compiled, without blocking other requests.

Knows waiting requests and a compiler. Does not know rows or tokens. If the compile fails, the gate admits the request,
which then fails alone on the worker, with the reason.
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
    """Calls `wake` from a thread when a grammar is ready, because the engine loop may be asleep.

    If the worker is `elsewhere`, in a process with a compiler of its own, the plans list the grammars that compile
    here, so that both compilers finish before the request enters.
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
        """Asks the compiler once per request: it may have evicted a finished grammar, and asking again would wait
        again."""
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
            # Needed even if the worker asked first: when it recompiles a grammar, it does not call `wake`.
            compiled.add_done_callback(partial(self._done, ref(request)))
        return request in self._ready

    def holds(self, request: Request) -> bool:
        return request in self._asked and request not in self._ready

    def gave_up(self, request: Request) -> None:
        """Drop the compile, even a running one, if no other request waits for it."""
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
        """Forget the request: it may return much later, and asks again then."""
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
    """Compiles that the worker's compiler drops, and then those that it starts."""

    wanted: list[StructuredOutputsParams]
    dropped: list[StructuredOutputsParams]


def apply_compile_requests(compiler: GrammarCompiler, extra: bytes) -> None:
    """Apply the requests of `GrammarGate.extra`."""
    told = msgspec.msgpack.decode(extra, type=CompileRequests)
    for constraint in told.dropped:
        compiler.drop(constraint)
    for constraint in told.wanted:
        compiler.ask(constraint)
