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
from quire.kvcache.manager import KVManager
from quire.kvstore.disk import Key
from quire.kvstore.redis_store import RedisStore
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

LOOKUP_S = 1.0
MOST_LOOKUPS = 64
"""Requests whose look-ups run at once."""
MOST_BLOCKS = 16_384
"""Of one request; later ones are computed."""
TOKENS_A_PLAN = 1 << 16
"""Tokens whose hashes one plan may compute for look-ups, and the last request's rest."""


@dataclass(eq=False, slots=True)
class Lookup:
    """The look-up of one waiting request. `keys`: the names of its missing blocks, in the order of its prompt."""

    keys: Sequence[Key]
    deadline: float
    is_done: bool = False


class LookupGate(Gate):
    """Plug it in before the gate that loads (KVTierGate.order).

    Args:
        is_local: whether a store on this machine has the record, so that nobody needs to ask.
        wake: called by the thread when there is an answer.
        waited: told how many seconds each request waited.
    """

    name = "kv_lookups"
    order = 28

    def __init__(
        self, kv: KVManager, store: RedisStore, is_local: Callable[[Key], bool], wake: Callable[[], None],
        waited: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.kv, self.store, self.is_local = kv, store, is_local
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
        groups = range(len(self.kv.groups))
        keys = [(group, name) for name in request.hashes[first:last] for group in groups]
        if not (keys := [key for key in keys if not self.is_local(key)]):
            return None
        lookup = self.lookups[request] = Lookup(keys, self.clock() + LOOKUP_S)
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
            lookup.is_done = True
            self._wake()

    def close(self) -> None:
        self._jobs.put(None)
