"""Mode "per request": one Transformers cache for each row, and one forward pass per row.

Knows row numbers and the length of each cache. Does not know plans, blocks or sampling. A row that starts at
position 0 (a new request, or one after a preemption) always gets a new cache, so a missed `forget` can cost
memory but never correctness.

Shape suffixes: T tokens of one row in this step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class _Row:
    cache: Any  # None until the model has made its own kind
    length: int = 0


class PerRequestCaches:
    """Maps row numbers to caches.

    Args:
        forward: (ids_1T, positions_1T, cache) -> (hidden_1TD, cache).
        new_cache: makes an empty cache, or None if the model makes its own in the first pass.
        one_by_one: continue token by token; for models that can start with many tokens or continue with
            one, but are wrong when they continue with several (some recurrent layers).
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]],
        new_cache: Callable[[], Any],
        one_by_one: bool = False,
    ):
        self._forward = forward
        self._new_cache = new_cache
        self.one_by_one = one_by_one
        self._rows: dict[int, _Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def forget(self, rows: Iterable[int]) -> None:
        """Free the caches of rows that requests leave or enter."""
        for row in rows:
            self._rows.pop(row, None)

    def run(self, row: int, start: int, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Continue `row`, which has computed `start` tokens. Returns hidden_TD.

        Raises:
            RuntimeError: the row's cache does not have exactly `start` tokens; its request must be
                computed again from its first token.
        """
        if start == 0:
            self._rows[row] = _Row(self._new_cache())
        state = self._rows.get(row)
        if state is None or state.length != start:
            have = "no cache" if state is None else f"a cache of {state.length} tokens"
            raise RuntimeError(f"row {row} continues at token {start}, but its cache has {have}")
        state.length = -1  # until the pass is done; a failed pass leaves the cache unusable
        step = 1 if self.one_by_one and start else len(ids_T)
        parts = []
        for offset in range(0, len(ids_T), step):
            hidden_1TD, state.cache = self._forward(
                ids_T[None, offset : offset + step],
                positions_T[None, offset : offset + step],
                state.cache,
            )
            parts.append(hidden_1TD[0])
        state.length = start + len(ids_T)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
