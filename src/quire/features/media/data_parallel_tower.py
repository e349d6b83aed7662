"""DataParallelTower: each rank has the whole tower and encodes some of the items of a pass (`--mm-encoder-tp-mode data`).

Knows ranks and rows. Does not know the tower's inside.

Shape suffixes: N rows of an item, F features of a row, L the most rows of a rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.features.media.item_encoder import FAULTS, Tower
from quire.protocol.media import TowerInput

if TYPE_CHECKING:
    from quire.layers.lora import Place
    from quire.parallel.ranks import RankGroup


class DataParallelTower:
    """All ranks call `encode` with the same items. An item's bits do not depend on others, so the rows are those of one tower.

    Args:
        width: features of a row.
    """

    def __init__(
        self, tower: Tower, ranks: RankGroup, width: int, dtype: torch.dtype, device: torch.device
    ):
        self.tower, self.ranks, self.width = tower, ranks, width
        self.dtype, self.device = dtype, device

    def adapter_places(self) -> Mapping[str, Place]:
        """See `AdaptedEncoder` (layers/lora.py)."""
        return self.tower.adapter_places()

    def adapter_name(self, module: str) -> str | None:
        """See `AdaptedEncoder` (layers/lora.py)."""
        return self.tower.adapter_name(module)

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        """rows_NF of each item.

        Raises:
            ValueError: a rank cannot encode its items. RankLost: a rank did not come.
        """
        owners = owners_of([item.num_rows for item in items], self.ranks.size)
        counts = [0] * self.ranks.size
        for owner, item in zip(owners, items, strict=True):
            counts[owner] += item.num_rows
        own_LF = self._own([item for owner, item in zip(owners, items, strict=True) if owner == self.ranks.rank], max(counts))  # fmt: skip
        all_LRF = self.ranks.gather(own_LF).view(len(own_LF), self.ranks.size, -1)
        if all_LRF[-1].any():
            raise ValueError("a rank cannot encode its items")
        found, begins = [], [0] * self.ranks.size
        for owner, item in zip(owners, items, strict=True):
            begin = begins[owner]
            begins[owner] += item.num_rows
            found.append(all_LRF[begin : begins[owner], owner])
        return found

    def _own(self, items: Sequence[TowerInput], most: int) -> Tensor:
        """This rank's rows, then zeros up to `most` rows, and a row that is not zero if this rank failed."""
        own_LF = torch.zeros(most + 1, self.width, dtype=self.dtype, device=self.device)
        try:
            rows = self.tower.encode(items) if items else []
            own = torch.cat(rows) if rows else own_LF[:0]
            if len(own) != sum(item.num_rows for item in items):
                raise ValueError(f"{len(own)} rows")
            own_LF[: len(own)] = own
        except FAULTS:  # the other ranks wait
            own_LF[-1] = 1
        return own_LF


def owners_of(rows: Sequence[int], ranks: int) -> list[int]:
    """Of items with these rows, which rank encodes each: the largest first, to the rank with the fewest rows."""
    loads, owners = [0] * ranks, [0] * len(rows)
    for item in sorted(range(len(rows)), key=lambda i: -rows[i]):
        owners[item] = loads.index(min(loads))
        loads[owners[item]] += rows[item]
    return owners
