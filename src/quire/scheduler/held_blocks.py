"""HeldBlocks: the blocks of requests without a row: not yet, or not any more.

Knows which gate needs the blocks of which request. Does not know why. The blocks are the request's and in use.

    loading   a waiting request; a gate loads keys and values into its blocks. The scheduler skips it.
    loaded    a waiting request, which gets a row next. Its blocks are taken back before a running request is preempted.
    kept      the request has lost its row, or its load is not needed any more. The blocks are freed when every gate is done
              with them (`Gate.release`); until then a preempted request is skipped.

A request may lose its row while steps in flight compute blocks that it has published. What it published is noted: if one of
these steps fails, the content is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from quire.kvcache.block_pool import NULL_BLOCK
from quire.kvcache.manager import KVManager
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

Load = tuple[Gate | None, int]
"""The gate that has the keys and values of a request's next tokens, and how many tokens; None, 0: no gate has."""


class LeftBlocks(NamedTuple):
    """The blocks of a request when it lost its row, and the content that it had published in them."""

    last_step: int
    """In flight at that time."""
    request: Request
    blocks: set[int]
    published: dict[int, tuple[int, bytes]]


class HeldBlocks:
    """Gives a request blocks before its row, and frees them after it, when no gate needs them."""

    def __init__(self, kv: KVManager):
        self.kv = kv
        self._loading: dict[Request, Gate] = {}
        self._loaded: dict[Request, Gate] = {}
        self._kept: dict[Request, list[Gate]] = {}
        self._left: list[LeftBlocks] = []

    def __len__(self) -> int:
        """How many requests have blocks that a gate needs."""
        return len(self._loading) + len(self._kept)

    def __contains__(self, request: Request) -> bool:
        return request in self._loading or request in self._kept

    def retry(self) -> None:
        """Ask the gates again."""
        for request, gate in list(self._loading.items()):
            if (loaded := gate.loaded(request)) is not None:
                self._finish_load(request)
                if not loaded:
                    self.take_back(request)
        for request, gates in list(self._kept.items()):
            self.release(request, gates)

    # -- before the row ---------------------------------------------------------------------------
    def find_load(self, request: Request, start: int, gates: Sequence[Gate]) -> Load:
        """Which gate can load full blocks from `start` on. At least one token remains to be computed."""
        size = self.kv.block_size
        room = (len(request.tokens) - 1) // size - start // size
        for gate in gates:
            if room > 0 and (num_blocks := min(gate.can_load(request, start) // size, room)) > 0:
                end = start // size + num_blocks
                if not gate.meets_limits:
                    num_blocks = self.kv.usable(request, end, end) - start // size
                return (gate, num_blocks * size) if num_blocks > 0 else (None, 0)
        return None, 0

    def load(self, request: Request, gate: Gate, num_tokens: int) -> None:
        """The waiting request owns blocks: let the gate fill those after its computed tokens, which then count as computed."""
        start = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        self._loading[request] = gate
        gate.load(request, start, num_tokens)
        if gate.loaded(request):
            self._finish_load(request)

    def _finish_load(self, request: Request) -> None:
        self._loaded[request] = self._loading.pop(request)

    def start(self, request: Request) -> int:
        """How many tokens are loaded of a request that waits for a row; 0: none. It loses its blocks if it cannot continue
        after them any more (`PrefixLimit`)."""
        if request not in self._loaded:
            return 0
        num_blocks = request.num_computed_tokens // self.kv.block_size
        if self.kv.usable(request, num_blocks, num_blocks) < num_blocks:
            self.take_back(request)
        return request.num_computed_tokens

    def enter(self, request: Request) -> None:
        """The request gets a row."""
        self._loaded.pop(request, None)

    def take_back(self, request: Request) -> None:
        """Free the blocks of a waiting request, if it owns some, when the gate that fills them is done with them."""
        if request in self._loading or request in self._loaded:
            gate = self._loading.pop(request, None) or self._loaded.pop(request)
            request.num_computed_tokens = 0
            self.release(request, [gate])

    def take_back_last(self, also_loading: bool) -> bool:
        """Do so for the last waiting request with blocks. False: there is none."""
        requests = [*self._loaded, *self._loading] if also_loading else self._loaded
        if not requests:
            return False
        self.take_back(max(requests, key=lambda request: request.order))
        return True

    # -- after the row ----------------------------------------------------------------------------
    def leave(
        self, request: Request, gates: Sequence[Gate], steps_in_flight: Collection[int]
    ) -> None:
        """The request has lost its row: release its blocks."""
        self._left = [left for left in self._left if left.last_step in steps_in_flight]
        if steps_in_flight and (published := self.kv.published_by(request)):
            used = self.kv.used_by(request)
            self._left.append(LeftBlocks(max(steps_in_flight), request, used, published))
        self.release(request, gates)

    def retract_left(
        self, step: int, requests: Collection[Request], wrong_blocks: set[int]
    ) -> set[int]:
        """Step `step` failed for these requests, and `wrong_blocks` have wrong content.

        Unpublishes what these requests, and requests that shared such blocks, had published when they lost their rows. Takes
        wrong blocks back from waiting requests. Returns all wrong blocks.
        """
        wrong_blocks = set(wrong_blocks)
        in_time = [left for left in self._left if left.last_step >= step]
        for left in sorted(in_time, key=lambda left: left.request not in requests):
            if left.request in requests or wrong_blocks & left.blocks:
                wrong_blocks |= self.kv.retract_content(left.published)
        for request in [*self._loading, *self._loaded]:
            if any(wrong_blocks.intersection(column) for column in request.blocks):
                self.take_back(request)
        return wrong_blocks

    def release(self, request: Request, gates: Sequence[Gate]) -> None:
        """Free the blocks of a request, unless some of these gates hold them back."""
        if holding_gates := [gate for gate in gates if not gate.release(request)]:
            self._kept[request] = holding_gates
        else:
            self._kept.pop(request, None)
            self.kv.release(request)

    def revoke(self) -> None:
        """Free all blocks now. Their gates must not use them any more."""
        for request, gate in [*self._loading.items(), *self._loaded.items()]:
            request.num_computed_tokens = 0
            self._kept[request] = [gate]
        self._loading.clear()
        self._loaded.clear()
        for request, gates in self._kept.items():
            for gate in gates:
                gate.revoke(request)
            self.kv.release(request)
        self._kept.clear()

    def of_preempted(self) -> bool:
        """Whether blocks are held back of requests that are to be admitted again."""
        return any(request.finish is None for request in self._kept)

    @property
    def num_blocks(self) -> int:
        """How many different blocks these requests own."""
        requests = [*self._loading, *self._loaded, *self._kept]
        blocks = {b for request in requests for column in request.blocks for b in column}
        return len(blocks - {NULL_BLOCK})
