"""LookupGate: asks a shared store which blocks of a waiting request it has, before the request is considered.

A store on this machine answers from its index; a server takes a round trip, so a thread asks, and the request waits for the
answer, LOOKUP_S at most. Then `gate.py` loads what is there. Knows requests, names and time; does not know records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from quire.features.kv_tiers import rates
from quire.features.kv_tiers.states import KeptStates
from quire.kvcache.manager import KVManager
from quire.kvstore.disk import Key
from quire.kvstore.redis_store import NAMES_AT_ONCE, RedisStore
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

LOOKUP_S = 1.0
MOST_LOOKUPS = 64
"""Requests whose look-ups run at once."""
MOST_BLOCKS = 16_384
"""Of one request; later ones are computed."""
MOST_STATES = 2
"""Of one request: the last one may have lost a part."""
TOKENS_A_PLAN = 1 << 16
"""Tokens whose hashes one plan may compute for look-ups, and the last request's rest."""


@dataclass(eq=False, slots=True)
class Lookup:
    """The look-up of one waiting request. `keys`: the names of the request's missing blocks, in the order of the prompt; `states`: the names of
    the blocks at whose end a recurrent state may be kept, with the last block first."""

    keys: Sequence[Key]
    states: Sequence[bytes]
    deadline: float
    is_done: bool = False


class LookupGate(Gate):
    """Plug it in before the gate that loads (KVTierGate.order).

    Args:
        states: of the gate that loads.
        group_bytes: of a block, by KV group.
        is_local: whether a store on this machine has the record, so that nobody needs to ask.
        wake: called by the thread when there is an answer.
        waited: told how many seconds each request waited.
    """

    name = "kv_lookups"
    order = 28

    def __init__(
        self, kv: KVManager, store: RedisStore, states: KeptStates, group_bytes: Sequence[int], is_local: Callable[[Key], bool], wake: Callable[[], None],
        waited: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.kv, self.store, self.states, self.is_local = kv, store, states, is_local
        self.groups = [group for group, num_bytes in enumerate(group_bytes) if num_bytes]
        self._wake, self._waited, self.clock = wake, waited, clock
        self.lookups: dict[Request, Lookup] = {}
        self.answered: set[Request] = set()
        self.tokens_left = TOKENS_A_PLAN
        self._jobs: SimpleQueue[Lookup | None] = SimpleQueue()
        threading.Thread(target=self._ask_all, name="kv-lookup", daemon=True).start()

    def begin(self, running: Sequence[Request]) -> None:
        self.tokens_left = TOKENS_A_PLAN

    def ready(self, request: Request) -> bool:
        if request in self.answered or not self.store.is_open:
            return True
        lookup = self.lookups.get(request)
        if lookup is None:
            if len(self.lookups) >= MOST_LOOKUPS or self.tokens_left <= 0:
                return False
            if (lookup := self._begin(request)) is None:
                self.answered.add(request)
                return True
        if not lookup.is_done and self.clock() > lookup.deadline:
            self.store.late()
        elif not lookup.is_done:
            return False
        del self.lookups[request]
        self._waited(self.clock() - lookup.deadline + LOOKUP_S)
        self.answered.add(request)
        return True

    def is_blocking(self, request: Request) -> bool:
        return request in self.lookups

    def _begin(self, request: Request) -> Lookup | None:
        """None: there is nothing to ask."""
        if request.params.skip_reading_prefix_cache:
            return None
        size = self.kv.block_size
        self.tokens_left -= len(request.tokens) - len(request.hashes) * size
        first = self.kv.match(request)[0] // size
        last = min((len(request.tokens) - 1) // size, len(request.hashes), first + MOST_BLOCKS)
        if (last - first) * size < rates.FEWEST_TOKENS:
            return None
        keys = [(group, name) for name in request.hashes[first:last] for group in self.groups]
        keys = [key for key in keys if not self.is_local(key)]
        states = [
            name
            for name in self.states.places(request.hashes, first, last)
            if not self.states.is_kept(name, self.is_local)
        ]
        if not (keys or states):
            return None
        lookup = self.lookups[request] = Lookup(keys, states, self.clock() + LOOKUP_S)
        self._jobs.put(lookup)
        return lookup

    def enter(self, request: Request) -> None:
        self.answered.discard(request)  # after a preemption it asks again

    def on_waiting_ended(self, request: Request) -> None:
        self.answered.discard(request)
        self.lookups.pop(request, None)

    def _ask_all(self) -> None:
        while (lookup := self._jobs.get()) is not None:
            if self.store.is_open:
                self.store.find(lookup.keys)
                self._find_state(lookup)
            lookup.is_done = True
            self._wake()

    def _find_state(self, lookup: Lookup) -> None:
        """Ask for the last states whose blocks are there; of each first for the part that is written last."""
        needed = [key for key in lookup.keys if key[0] in self.kv.unbounded]
        missing = {key[1] for key in needed if key not in self.store}
        names = [name for name in lookup.states if name not in missing]
        for start in range(0, len(names), NAMES_AT_ONCE):
            last = [self.states.keys(name)[-1] for name in names[start : start + NAMES_AT_ONCE]]
            self.store.find(last)
            if found := [name for part, name in last if (part, name) in self.store]:
                for name in found[:MOST_STATES]:
                    self.store.find(self.states.keys(name)[:-1])
                return

    def close(self) -> None:
        self._jobs.put(None)
