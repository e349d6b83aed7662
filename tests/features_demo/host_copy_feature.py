"""A feature that keeps copies of blocks on the host, by hash, and loads them for later requests. No torch at import.

The blocks of a request are copied after it has lost its row, and loaded before it gets one. It is small: it evicts nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature
from quire.kvcache.block_pool import NULL_BLOCK
from quire.protocol.plan import StepPlan
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts

NAME = "host_copy"


class Copies(msgspec.Struct):
    """The copies of one plan; of each: (number, [(group, block, hash)])."""

    saves: list[tuple[int, list[tuple[int, int, bytes]]]] = []
    loads: list[tuple[int, list[tuple[int, int, bytes]]]] = []


class HostCopyGate(Gate):
    """Which blocks are copied, and when. Requests with an odd number wait until their blocks are filled."""

    name, order = NAME, 10

    def __init__(self, counts: dict[str, float], block_size: int):
        self.counts, self.block_size = counts, block_size
        self.saved: set[tuple[int, bytes]] = set()
        self.next = Copies()
        self.number = 0
        self.saving: dict[Request, Any] = {}
        self.loading: dict[Request, Any] = {}
        self.done: set[int] = set()
        self.sent: dict[int, list[int]] = {}  # by step
        self.lost: set[int] = set()

    # -- before the row
    def can_load(self, request: Request, start: int) -> int:
        groups = range(len(request.blocks) or 1)
        count = 0
        for hash in request.hashes[start // self.block_size :]:
            if any((group, hash) not in self.saved for group in groups):
                break
            count += self.block_size
        return count

    def load(self, request: Request, start: int, num_tokens: int) -> None:
        self.number += 1
        indices = range(start // self.block_size, (start + num_tokens) // self.block_size)
        self.loading[request] = self.number, self._named(request, indices)
        self.counts["host_copy_loaded"] += num_tokens
        if request.number % 2:
            self.next.loads.append(self.loading[request])

    def loaded(self, request: Request) -> bool | None:
        number = self.loading[request][0]
        if number in self.lost:
            return False
        return request.number % 2 == 0 or number in self.done or None

    def enter(self, request: Request) -> None:
        load = self.loading.pop(request, None)
        if load is not None and request.number % 2 == 0:
            self.next.loads.append(load)

    # -- after it
    def release(self, request: Request) -> bool:
        self.loading.pop(request, None)
        if request not in self.saving:
            blocks = [
                each
                for each in self._named(request, range(request.num_published_blocks))
                if (each[0], each[2]) not in self.saved
            ]
            if not blocks:
                return True
            self.number += 1
            self.saving[request] = self.number, blocks
            self.next.saves.append(self.saving[request])
        number, blocks = self.saving[request]
        if number not in self.done | self.lost:
            return False
        if number in self.done:
            self.saved.update((group, hash) for group, _, hash in blocks)
        del self.saving[request]
        return True

    def revoke(self, request: Request) -> None:
        if (save := self.saving.pop(request, None)) in self.next.saves:
            self.next.saves.remove(save)
        self.loading.pop(request, None)

    def _named(self, request: Request, indices: range) -> list[tuple[int, int, bytes]]:
        return [
            (group, column[index], request.hashes[index])
            for group, column in enumerate(request.blocks)
            for index in indices
            if column[index] != NULL_BLOCK
        ]

    # -- with the hook
    def data_for_hook(self, plan: StepPlan) -> bytes | None:
        copies, self.next = self.next, Copies()
        self.sent[plan.step] = [number for number, _ in [*copies.saves, *copies.loads]]
        return msgspec.msgpack.encode(copies) if copies.saves or copies.loads else None

    def data_from_hook(self, extra: bytes) -> None:
        self.done.update(msgspec.msgpack.decode(extra))

    def failed(self, step: int) -> set[int]:
        self.lost.update(self.sent.pop(step, ()))
        return set()


class HostCopyFeature(Feature):
    """On if there is a folder `host_copy` beside the model's."""

    name = NAME

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return Path(resolved.path).with_name(NAME).is_dir()

    def plug_into_engine(self, engine: EngineParts) -> None:
        engine.gates.append(HostCopyGate(engine.core.counts, self.resolved.block_size))
        engine.counters.append("host_copy_loaded")

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from host_copy_hook import HostCopyHook

        parts.hooks.append(HostCopyHook(NAME, parts.models))
