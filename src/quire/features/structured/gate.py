"""The gate: a request waits until its grammar is compiled, and holds up nobody meanwhile.

Knows waiting requests and a compiler. Does not know rows or tokens. A grammar that cannot be compiled lets its
request through: it fails alone, on the worker, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

import msgspec

from quire.features.structured.compile import Compiler
from quire.protocol.constraint import StructuredOutputsParams
from quire.protocol.plan import StepPlan
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

if TYPE_CHECKING:
    from quire.features.structured.compile import Matcher

NAME = "structured"


class GrammarGate(Gate):
    """`wake` is called from a thread when a grammar is ready: the loop may be asleep.

    With the worker `elsewhere`, in a process with a compiler of its own, plans tell it what is being compiled here, so
    that both are done when the request enters.
    """

    name = NAME

    def __init__(
        self,
        compiler: Compiler,
        wake: Callable[[], None] | None = None,
        elsewhere: bool = False,
    ):
        self.compiler, self.wake, self.elsewhere = compiler, wake, elsewhere
        self._announced: dict[tuple[object, ...], StructuredOutputsParams] = {}
        self._asked: WeakSet[Request] = WeakSet()
        self._ready: WeakSet[Request] = WeakSet()

    def ready(self, request: Request) -> bool:
        """It asks once for each: what was compiled for one may be forgotten by the time the last was asked for, and
        whoever asks again would wait again."""
        if (constraint := request.params.structured_outputs) is None or request in self._ready:
            return True
        if request not in self._asked:
            self._asked.add(request)
            compiled = self.compiler.ask(constraint)
            if compiled.done():
                self._ready.add(request)
                return True
            if self.elsewhere:
                self._announced.setdefault(constraint.key, constraint)
            # Whoever else asked for it: the worker, which compiles a spent grammar anew, wakes nobody.
            compiled.add_done_callback(partial(self._done, ref(request)))
        return request in self._ready

    def leave(self, request: Request) -> None:
        """It may come back much later."""
        self._asked.discard(request)
        self._ready.discard(request)

    def _done(self, asker: ref[Request], _: Future[Matcher]) -> None:
        if (request := asker()) is not None:
            self._ready.add(request)
        if self.wake is not None:
            self.wake()

    def extra(self, plan: StepPlan) -> bytes | None:
        if not self._announced:
            return None
        told, self._announced = list(self._announced.values()), {}
        return msgspec.msgpack.encode(told)


def announced(extra: bytes) -> list[StructuredOutputsParams]:
    """What `GrammarGate.extra` said."""
    return msgspec.msgpack.decode(extra, type=list[StructuredOutputsParams])
