"""Gates of the random workloads that fill blocks with what was computed before, as from memory of the host.

The data that they send (`plan.extras`) is [[block, content], ...]; the toy device writes it before the plan's work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec
from toy_device import histories

from quire.kvcache.block_pool import NULL_BLOCK
from quire.scheduler.gate import Gate
from quire.scheduler.request import NO_ROW

Writes = list[tuple[int, list[Any]]]


class Store:
    """Has the content of most blocks, as if another engine had computed them. A BlockListener."""

    def __init__(self, rng: random.Random, kin: dict[str, tuple]):
        self.rng, self.kin = rng, kin
        self.scheduler: Any = None
        self.published: dict[int, tuple[int, bytes]] = {}

    def on_publish(self, group: int, block: int, hash: bytes) -> None:
        assert block not in self.published, "published twice"
        self.published[block] = (group, hash)

    def on_forget(self, group: int, block: int, hash: bytes) -> None:
        assert self.published.pop(block) == (group, hash), "forgotten and never published"

    def known(self, request, start: int) -> list[bytes]:
        """The hashes of the request's blocks from `start` on that are here."""
        kv = self.scheduler.kv
        kv.hasher.extend(request.hashes, request.root, request.tokens, request.media)
        hashes = request.hashes[start // kv.block_size :]
        return list(takewhile(lambda hash: hash[0] % 8, hashes))

    def content(self, request, group: int, index: int) -> list[Any]:
        """Of the request's block number `index`."""
        size = self.scheduler.kv.block_size
        history = histories(request.tokens)
        places = range(index * size, (index + 1) * size)
        return [(group, request.tokens[p], self.kin[request.id], history[p]) for p in places]


@dataclass
class Load:
    """One load of a request's blocks."""

    writes: Writes
    delay: int  # how often the gate answers "not yet"
    fails: bool
    waits: bool  # until a result says that the blocks are written; else the writes are in the plan that gives the row
    state: str = "new"  # sent, written, lost


class LoadingGate(Gate):
    """Loads blocks for requests that wait for a row."""

    name, order = "loading", 10

    def __init__(self, store: Store, share: float):
        self.store, self.share, self.rng = store, share, store.rng
        self.loads: dict[Any, Load] = {}
        self.hopeless: set[Any] = set()
        self.to_send: list[Load] = []
        self.sent: dict[int, list[Load]] = {}
        self.count = self.held = self.unused = self.lost = self.revoked = 0

    def can_load(self, request, start):
        assert request.row == NO_ROW
        assert request not in self.loads, f"{request.id} is loaded twice"
        if request in self.hopeless or self.share <= request.number % 10 / 10:
            return 0
        return len(self.store.known(request, start)) * self.store.scheduler.kv.block_size

    def load(self, request, start, num_tokens):
        kv = self.store.scheduler.kv
        assert request.row == NO_ROW
        assert 0 < start + num_tokens < len(request.tokens)
        indices = range(start // kv.block_size, (start + num_tokens) // kv.block_size)
        writes = [
            (column[index], self.store.content(request, g, index))
            for g, column in enumerate(request.blocks)
            for index in indices
            if column[index] != NULL_BLOCK
        ]
        rng = self.rng
        self.loads[request] = Load(
            writes, rng.choice([0, 0, 1, 4, 9]), rng.random() < 0.05, rng.random() < 0.5
        )
        self.count += 1

    def loaded(self, request):
        load = self.loads[request]
        if load.delay:
            load.delay -= 1
            return None
        if load.fails or load.state == "lost":
            self.hopeless.add(request)
            load.fails = True
            return False
        if not load.waits or load.state == "written":
            return True
        if load.state == "new":
            load.state = "queued"
            self.to_send.append(load)
        return None

    def enter(self, request):
        if (load := self.loads.pop(request, None)) is not None:
            assert not load.delay, f"{request.id} enters before its blocks are loaded"
            assert not load.fails, f"{request.id} enters with a load that failed"
            owned = {block for column in request.blocks for block in column}
            assert owned.issuperset(block for block, _ in load.writes)
            if not load.waits:
                self.to_send.append(load)
            else:
                assert load.state == "written"

    def release(self, request):
        if (load := self.loads.get(request)) is None:
            return True
        assert request.row == NO_ROW
        if load in self.to_send:
            self.to_send.remove(load)
            load.state = "new"
        if load.state == "sent":
            self.held += 1
            return False  # the blocks are written later
        del self.loads[request]
        self.unused += 1
        return True

    def revoke(self, request):
        load = self.loads.pop(request)
        if load in self.to_send:
            self.to_send.remove(load)
        self.revoked += 1

    def data_for_hook(self, plan):
        if not self.to_send:
            return None
        for load in self.to_send:
            load.state = "sent"
        self.sent[plan.step], self.to_send = self.to_send, []
        return msgspec.msgpack.encode([w for load in self.sent[plan.step] for w in load.writes])

    def data_from_hook(self, extra):
        for load in self.sent.pop(msgspec.msgpack.decode(extra)):
            load.state = "written"

    def failed(self, step):
        lost = self.sent.pop(step, [])
        for load in lost:
            load.state = "lost"
        self.lost += len(lost)
        waiting = [load for load in lost if load in self.loads.values()]
        return {block for load in waiting for block, _ in load.writes}

    def on_waiting_ended(self, request):
        self.hopeless.discard(request)
