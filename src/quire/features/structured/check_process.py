"""The frontend's constraint checks, run in a process with limits, and a cache of their results.

Knows constraints and processes. Does not know the checks themselves (`validate.py`) or HTTP.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from quire.features.structured.compiler import digest
from quire.features.structured.grammar_process import GrammarForkServer, GrammarProcess
from quire.features.structured.json_schema import MAX_BYTES
from quire.features.structured.validate import check_constraint, fault_of
from quire.processes.isolated_child import ProcessEnded
from quire.protocol.structured_outputs import StructuredOutputsParams

MAX_CACHED = 512  # cached results: agents send the same schema repeatedly
CPU_S = 1.0  # limit of one check; the largest accepted schema needs 0.1 s
MAX_PROCESSES = 2
TOO_MUCH = (
    "parsing it takes too much processor time or memory; make it smaller, or use fewer repetitions"
)


class ConstraintChecker:
    """One per frontend; thread-safe. The first constraint starts its process."""

    def __init__(self) -> None:
        self._fork_server = GrammarForkServer()
        self._idle: list[GrammarProcess] = []
        self._cache: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(MAX_PROCESSES)

    def checked(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        """As `validate.check_constraint`, and raises CompileDelayed. Blocks: run it in a thread."""
        return check_constraint(constraint, self._fault_of)

    def _fault_of(self, constraint: StructuredOutputsParams) -> str | None:
        value = getattr(constraint, constraint.kind)
        size = sum(map(len, value)) if isinstance(value, list) else len(str(value))
        if size > MAX_BYTES:
            return fault_of(constraint)  # refuses it for its size, at once
        key = digest(constraint)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        with self._slots:
            fault = self._ask(constraint)
        with self._lock:
            self._cache[key] = fault
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return fault

    def _ask(self, constraint: StructuredOutputsParams) -> str | None:
        process = self._process()
        try:
            fault = process.check(constraint, CPU_S)
        except ProcessEnded:
            return TOO_MUCH
        with self._lock:
            self._idle.append(process)
        return fault

    def _process(self) -> GrammarProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._fork_server.fork()
