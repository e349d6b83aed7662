"""Grammar gate: a request waits until its grammar is compiled, without blocking other requests.

Knows waiting requests and a compiler. Does not know rows or tokens. If the compile fails, the gate admits the request,
which then fails alone on the worker, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, ref

import msgspec
from msgspec import Struct

from quire.features.structured.compiler import GrammarCompiler
from quire.protocol.plan import StepPlan
from quire.protocol.sampling_params import SamplingParams
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
    here, so that both compilers finish before the request enters. If it `waits`, so does the loop, and the step in which a
    request enters does not depend on time.
    """

    name = NAME
    order = 10

    def __init__(
        self,
        compiler: GrammarCompiler,
        wake: Callable[[], None] | None = None,
        elsewhere: bool = False,
        waits: bool = False,
    ):
        self.compiler, self.wake, self.elsewhere, self.waits = compiler, wake, elsewhere, waits
        self._to_compile: dict[_Key, StructuredOutputsParams] = {}
        self._to_cancel: dict[_Key, StructuredOutputsParams] = {}
        self._compiles: WeakKeyDictionary[Request, ref[Future[GrammarProcess]]] = (
            WeakKeyDictionary()
        )
        self._waiters: WeakKeyDictionary[Future[GrammarProcess], int] = WeakKeyDictionary()
        self._ready: WeakSet[Request] = WeakSet()

    def ready(self, request: Request) -> bool:
        """Asks the compiler once per request: it may have evicted a finished grammar, and asking again would wait
        again."""
        if (constraint := constraint_of(request)) is None or request in self._ready:
            return True
        if request not in self._compiles:
            compiled = self.compiler.submit(constraint)
            self._compiles[request] = ref(compiled)
            if self.waits:
                wait([compiled])
            if compiled.done():
                self._ready.add(request)
                return True
            self._waiters[compiled] = others = self._waiters.get(compiled, 0) + 1
            if self.elsewhere and others == 1:
                self._to_compile[constraint.key] = constraint
            # Needed even if the worker future first: when it recompiles a grammar, it does not call `wake`.
            compiled.add_done_callback(partial(self._done, ref(request)))
        return request in self._ready

    def is_blocking(self, request: Request) -> bool:
        return request in self._compiles and request not in self._ready

    def on_waiting_ended(self, request: Request) -> None:
        """Drop the compile, even a running one, if no other request waits for it."""
        constraint, future = constraint_of(request), self._compiles.pop(request, None)
        compiled = None if future is None else future()
        if constraint is None or compiled is None or compiled.done():
            return
        self._waiters[compiled] -= 1
        if not self._waiters[compiled]:
            self.compiler.cancel(constraint)
            if self.elsewhere and self._to_compile.pop(constraint.key, None) is None:
                self._to_cancel[constraint.key] = constraint

    def leave(self, request: Request) -> None:
        """Forget the request: it may return much later, and asks again then."""
        self._compiles.pop(request, None)
        self._ready.discard(request)

    def _done(self, asker: ref[Request], _: Future[GrammarProcess]) -> None:
        if (request := asker()) is not None:
            self._ready.add(request)
        if self.wake is not None:
            self.wake()

    def data_for_hook(self, plan: StepPlan) -> bytes | None:
        if not (self._to_compile or self._to_cancel):
            return None
        requests = CompileRequests(list(self._to_compile.values()), list(self._to_cancel.values()))
        self._to_compile, self._to_cancel = {}, {}
        return msgspec.msgpack.encode(requests)


def constraint_of(request: Request) -> StructuredOutputsParams | None:
    params = request.params
    return params.structured_outputs if isinstance(params, SamplingParams) else None


class CompileRequests(Struct, array_like=True):
    """Compiles that the worker's compiler drops, and then those that it starts."""

    to_compile: list[StructuredOutputsParams]
    to_cancel: list[StructuredOutputsParams]


def apply_compile_requests(compiler: GrammarCompiler, extra: bytes) -> None:
    """Apply the requests of `GrammarGate.data_for_hook`."""
    requests = msgspec.msgpack.decode(extra, type=CompileRequests)
    for constraint in requests.to_cancel:
        compiler.cancel(constraint)
    for constraint in requests.to_compile:
        compiler.submit(constraint)
