"""The gate: a request waits until its grammar is compiled, and holds up nobody meanwhile.

Knows waiting requests and a compiler. Does not know rows or tokens. A grammar that cannot be compiled lets its
request through: it fails alone, on the worker, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING
from weakref import WeakSet

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
        self._awaited: WeakSet[Future[Matcher]] = WeakSet()

    def ready(self, request: Request) -> bool:
        if (constraint := request.params.structured_outputs) is None:
            return True
        compiled = self.compiler.ask(constraint)
        if compiled.done():
            return True
        if self.elsewhere:
            self._announced.setdefault(constraint.key, constraint)
        # Whoever asked for it first: the worker, which compiles a spent grammar anew, wakes nobody.
        if compiled not in self._awaited:
            self._awaited.add(compiled)
            compiled.add_done_callback(self._done)
        return False

    def _done(self, _: Future[Matcher]) -> None:
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
