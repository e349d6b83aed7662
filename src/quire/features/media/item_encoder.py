"""ItemEncoder: rows of pictures, videos and sound, from the cache or from the tower.

What a step needs is encoded together, in passes of a bounded size. Knows items by their names in the cache. Does not know where they
are in prompts, or the tower's inside.

Shape suffixes: N rows of an item, F features of all layers of the tower that the language model takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.features.media.encoder_cache import EncoderCache
from quire.features.media.gate import EncoderCounts
from quire.forward_context import adapter_context
from quire.layers.lora import AdaptedEncoder
from quire.models.vision_towers.base import as_tensor
from quire.protocol.media import ROWS, TowerInput

FAULTS = (ValueError, RuntimeError, TypeError, IndexError, KeyError)
"""What a tower raises for tensors that it cannot take."""


class Tower(AdaptedEncoder, Protocol):
    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        """rows_NF of each item. Its bits do not depend on the others."""
        ...


class Wanted(NamedTuple):
    """An item that a step needs. `key`: its name in the cache, another one for each adapter. `adapter`: the number of the adapter that
    changes the tower; -1: none."""

    key: str
    item: TowerInput
    adapter: int = -1


class ItemEncoder:
    """Without a tower until `load_tower`.

    Args:
        load: loads the tower; None: clients send rows.
        most_rows: of the cache. pass_rows: of the items of a pass; one larger item is a pass. width: of a row.
    """

    def __init__(
        self,
        load: Callable[[], Tower] | None,
        most_rows: int,
        pass_rows: int,
        width: int,
        device: torch.device,
        dtype: str,
    ):
        self.load, self.pass_rows, self.width = load, pass_rows, width
        self.device = device
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.tower: Tower | None = None
        self.cache = EncoderCache(most_rows)
        self.counts = EncoderCounts(0, 0, 0)

    def load_tower(self) -> None:
        """If there is one."""
        self.tower = None if self.load is None else self.load()

    def drop_tower(self) -> None:
        """And what it has encoded."""
        self.tower = None
        self.cache.clear()

    def rows_of(self, wanted: Sequence[Wanted]) -> dict[str, Tensor | Exception]:
        """By key: rows_NF, or why the tower cannot encode the item."""
        found: dict[str, Tensor | Exception] = {}
        missing: dict[str, Wanted] = {}
        for one in wanted:
            key, item, _ = one
            if ROWS in item.tensors:
                found[key] = as_tensor(item.tensors[ROWS], self.device, self.dtype)
                continue
            self.counts.lookups += 1
            if key in missing or key in found:
                self.counts.hits += 1
            elif (rows_NF := self.cache.get(key)) is not None:
                self.counts.hits += 1
                found[key] = rows_NF
            else:
                missing[key] = one
        for some in self._passes(sorted(missing.values(), key=attrgetter("adapter"))):
            found |= self._encoded(some)
        return found

    def take_counts(self) -> EncoderCounts:
        """Since the last call."""
        counts, self.counts = self.counts, EncoderCounts(0, 0, 0)
        counts.cache_bytes = self.cache.num_bytes
        counts.cache_bytes_max = self.cache.most_rows * self.width * self.dtype.itemsize
        return counts

    def _passes(self, missing: Sequence[Wanted]) -> Iterator[list[Wanted]]:
        """The items of a pass have the same adapter, or none."""
        some: list[Wanted] = []
        count = 0
        for one in missing:
            is_full = count + one.item.num_rows > self.pass_rows
            if some and (is_full or one.adapter != some[0].adapter):
                yield some
                some, count = [], 0
            some.append(one)
            count += one.item.num_rows
        if some:
            yield some

    def _encoded(self, some: Sequence[Wanted]) -> dict[str, Tensor | Exception]:
        """A pass of the tower. If it fails, each item is encoded alone, so that others do not fail with one."""
        began = time.perf_counter()
        try:
            with adapter_context(None if some[0].adapter < 0 else some[0].adapter):
                rows = self._checked([one.item for one in some])
        except FAULTS as fault:
            if len(some) == 1:
                return {some[0].key: fault}
            return {key: rows for one in some for key, rows in self._encoded([one]).items()}
        self.counts.seconds += time.perf_counter() - began
        for one, rows_NF in zip(some, rows, strict=True):
            self.counts.rows += len(rows_NF)
            self.cache.put(one.key, rows_NF)
        return {one.key: rows_NF for one, rows_NF in zip(some, rows, strict=True)}

    def _checked(self, items: Sequence[TowerInput]) -> list[Tensor]:
        if self.tower is None:
            raise ValueError("there is no vision tower")
        with torch.inference_mode():
            rows = self.tower.encode(items)
        for item, rows_NF in zip(items, rows, strict=True):
            if len(rows_NF) != item.num_rows:
                raise ValueError(f"{len(rows_NF)} rows of an item with {item.num_rows} tokens")
        return [rows_NF.clone() for rows_NF in rows] if len(rows) > 1 else rows
