"""What the gate of kept blocks has begun: loads of requests, and copies that plans told the workers to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.features.kv_tiers.transfers import BlockRead
from quire.kvstore.disk import Key
from quire.scheduler.request import Request


class LoadCopy(NamedTuple):
    """One copy from a slot to a block of a request."""

    slot: int
    key: Key
    block: int
    request: Request


@dataclass(eq=False)
class TierLoad:
    """A request's blocks that are being loaded, in the order of the read's keys."""

    blocks: list[int]
    num_tokens: int
    deadline: float
    read: BlockRead
    near: list[LoadCopy]
    """From host memory; with pins until the copies are sent."""


@dataclass(slots=True)
class SentCopies:
    """The copies of one plan. `saves`: slot, key; `swaps`: the same, of blocks that stay in their slots."""

    saves: list[tuple[int, Key]] = field(default_factory=list)
    swaps: list[tuple[int, Key]] = field(default_factory=list)
    loads: list[LoadCopy] = field(default_factory=list)
    has_failed: bool = False
    is_outdated: bool = False
    """The cache has lost its content since."""
