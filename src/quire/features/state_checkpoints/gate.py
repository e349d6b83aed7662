"""CheckpointGate: prefix caching of models with recurrent states.

A layer with attention can continue after any cached block. A recurrent layer only continues where a copy of its state, a
checkpoint, was kept, since every step overwrites the state (docs/design/recurrent-state.md). The gate decides where:

    ends       the last boundary of a prompt, and every `interval` tokens of a longer one
    junctions  where the cached blocks of a prompt end, if no checkpoint is there: other requests with these blocks part
               from this prompt here

It ends a step's tokens of a request there (`allow`), and tells the worker's hook to copy the state after the step
(`data_for_hook`), which is when the step is certain to run. As a `PrefixLimit` it shortens a cached prefix to the last checkpoint.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import msgspec

from quire.kvcache.checkpoints import CheckpointPool
from quire.protocol.plan import StepPlan
from quire.scheduler.gate import Gate
from quire.scheduler.request import NO_ROW, Request
from quire.worker.state_hook import NAME, StateMoves


class CheckpointGate(Gate):
    """Plug it into the scheduler as a gate, and into its KVManager as a limit.

    Args:
        block_size: tokens of a block.
        boundary: checkpoints are at multiples of this number of tokens; a multiple of block_size.
        interval: and within a prompt at multiples of this number; 0: only at its end and at junctions.
        junctions: whether to keep checkpoints at junctions.
        counts: statistics, by their names in `observe/metric_table.py`; None: in a dict of its own.
    """

    name = NAME
    order = 90

    def __init__(
        self,
        pool: CheckpointPool,
        block_size: int,
        boundary: int,
        interval: int = 0,
        junctions: bool = True,
        counts: dict[str, float] | None = None,
    ):
        self.pool, self.block_size, self.boundary = pool, block_size, boundary
        self.interval, self.keeps_junctions = interval, junctions
        self.counts: dict[str, float] = {} if counts is None else counts
        self._rows: dict[int, Request] = {}
        # Of requests that run, or wait and have been considered:
        self._ends: dict[Request, int] = {}  # the last boundary of the prompt
        self._found: dict[Request, int] = {}  # tokens in blocks that are kept
        # Of these, and of requests that have ended while steps in flight still compute their tokens:
        self._saved: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()
        self._loads: list[tuple[int, int, int]] = []  # of the plan that is being made

    # -- as a PrefixLimit
    def usable(self, request: Request, num_found: int, num_blocks: int) -> int:
        """How many of the first `num_blocks` cached blocks end with a checkpoint. `num_found`: all that are cached, or kept elsewhere."""
        self._found[request] = max(num_found * self.block_size, self._found.get(request, 0))
        size = self.boundary // self.block_size
        last = num_blocks // size * size
        return next((n for n in range(last, 0, -size) if request.hashes[n - 1] in self.pool), 0)

    def reset(self) -> None:
        self.pool.reset()

    # -- as a Gate
    def allow(self, request: Request, start: int, num_tokens: int) -> int:
        if request.row == NO_ROW:
            self._ends[request] = (len(request.tokens) - 1) // self.boundary * self.boundary
        stop = self._next(request, start)
        return min(num_tokens, stop - start) if stop else num_tokens

    def _junction(self, request: Request) -> int:
        found = self._found.get(request, 0) if self.keeps_junctions else 0
        return found // self.boundary * self.boundary

    def _next(self, request: Request, start: int) -> int:
        """The first place after `start` that needs a checkpoint; 0: none."""
        end = self._ends[request]
        if start >= end:
            return 0
        stops = [self._junction(request), end]
        if self.interval:
            stops.append((start // self.interval + 1) * self.interval)
        fitting = (n for n in sorted(stops) if start < n <= end)
        return next((n for n in fitting if self._hash(request, n) not in self.pool), 0)

    def _hash(self, request: Request, num_tokens: int) -> bytes:
        """The hash of the block that ends there; empty while it is not computed."""
        number = num_tokens // self.block_size
        return request.hashes[number - 1] if number <= len(request.hashes) else b""

    def enter(self, request: Request) -> None:
        self._rows[request.row] = request
        if not request.preemptions:
            self._count("prefix_kv_hits", self._found.get(request, 0))
            self._count("prefix_state_hits", request.num_computed_tokens)
        if request.num_computed_tokens:
            found = self.pool.use(self._hash(request, request.num_computed_tokens))
            self._loads.append((request.row, found.slot, found.step))

    def leave(self, request: Request) -> None:
        self.on_waiting_ended(request)

    def on_waiting_ended(self, request: Request) -> None:
        if request.finish == "error":
            self.on_late_error(request)
        self._ends.pop(request, None)
        self._found.pop(request, None)

    def on_late_error(self, request: Request) -> None:
        """The checkpoints of a request that failed may be wrong."""
        for hash in self._saved.pop(request, ()):
            self.pool.forget(hash)

    def data_for_hook(self, plan: StepPlan) -> bytes | None:
        """Which checkpoints rows start from, and which the plan's step makes. They can be found from now on."""
        moves, self._loads = StateMoves(self._loads), []
        for item in plan.work:
            request = self._rows[item.row]
            if self._needs_checkpoint(request, end := request.num_computed_tokens):
                hash = self._hash(request, end)
                junction = end == self._junction(request) and end < self._ends[request]
                if (made := self.pool.add(hash, plan.step, junction)) is not None:
                    moves.saves.append((item.row, made.slot))
                    self._saved.setdefault(request, []).append(hash)
        return msgspec.msgpack.encode(moves) if moves.loads or moves.saves else None

    def _needs_checkpoint(self, request: Request, end: int) -> bool:
        if end > self._ends[request] or end % self.boundary or not self._hash(request, end):
            return False
        at_interval = self.interval and end % self.interval == 0
        wanted = at_interval or end in (self._ends[request], self._junction(request))
        return bool(wanted) and self._hash(request, end) not in self.pool

    def _count(self, name: str, number: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + number
