"""The gate: a request waits until its grammar is compiled, and holds up nobody meanwhile.

Knows waiting requests and a compiler. Does not know rows or tokens. A grammar that cannot be compiled lets its
request through: it fails alone, on the worker, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.features.structured.compile import Compiler
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request


class GrammarGate(Gate):
    """`wake` is called from a thread when a grammar is ready: the loop may be asleep."""

    name = "structured"

    def __init__(self, compiler: Compiler, wake: Callable[[], None] | None = None):
        self.compiler, self.wake = compiler, wake

    def ready(self, request: Request) -> bool:
        if (constraint := request.params.structured_outputs) is None:
            return True
        return self.compiler.ask(constraint, self.wake).done()
