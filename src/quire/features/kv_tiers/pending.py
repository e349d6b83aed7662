"""What the gate of kept blocks has begun: loads of requests, and copies that plans told the workers to run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.features.kv_tiers.states import StateLoad
from quire.features.kv_tiers.transfers import BlockRead
from quire.kvstore.disk import Key
from quire.scheduler.request import Request

HOST = "host"
"""The kind of the swap space (`swap.py`) among the kinds of stores."""


class LoadCopy(NamedTuple):
    """One copy from a slot to a block of a request, or of a part of a state to the place of a checkpoint."""

    slot: int
    key: Key
    block: int
    request: Request


@dataclass(eq=False)
class TierLoad:
    """A request's blocks that are being loaded, in the order of the read's keys, then the place of its state, once for each part."""

    blocks: list[int]
    num_tokens: int
    deadline: float
    read: BlockRead
    near: list[LoadCopy]
    """From host memory; with pins until the copies are sent."""
    state: StateLoad | None = None

    @property
    def is_ready(self) -> bool:
        """All blocks are in slots, and the state is in its place after the plans that are made."""
        return self.read.is_complete and not (self.state is not None and self.state.num_left)

    def tokens_by_kind(self, size: int) -> dict[str, int]:
        """Loaded tokens of the prompt by kind of store; `size`: of a block. A block whose KV groups came from several stores counts for the store
        of its last group; a block that was not loaded, since no window needs it any more, for the store of the first loaded block."""
        keys = self.read.keys
        kinds = {keys[place][0][1]: kind for place, kind in list(self.read.kinds.items())}
        kinds |= {one.key[1]: HOST for one in self.near}
        found = Counter(kinds.values())
        found[next(iter(found), HOST)] += self.num_tokens // size - found.total()
        return {kind: count * size for kind, count in sorted(found.items()) if count}


@dataclass(slots=True)
class SentCopies:
    """The copies of one plan. `saves`: slot, key; `swaps`: the same, of blocks that stay in their slots."""

    saves: list[tuple[int, Key]] = field(default_factory=list)
    swaps: list[tuple[int, Key]] = field(default_factory=list)
    loads: list[LoadCopy] = field(default_factory=list)
    states: list[StateLoad] = field(default_factory=list)
    """Whose parts are among the loads."""
    has_failed: bool = False
    is_outdated: bool = False
    """The cache has lost its content since."""
