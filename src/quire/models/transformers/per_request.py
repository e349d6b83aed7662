"""Mode "per request": a cache of Transformers for each row, and one forward pass a row.

Knows rows by number and where each stands. Does not know the plan, blocks or sampling. A row that starts
again at position 0 (a new request, or one that was preempted) gets a fresh cache whatever was there, so a
missed `forget` can cost memory but never correctness.

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
    cache: Any  # None until the model made its own kind
    length: int = 0


class OwnCaches:
    """Row number -> cache.

    Args:
        forward: (ids_1T, positions_1T, cache) -> (hidden_1TD, cache).
        new_cache: makes an empty cache, or None where the model makes its own at the first pass.
        one_by_one: continue token by token; for models that are right when they start with many tokens
            or continue with one, and wrong when they continue with several (some recurrent layers).
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
        """Give back the caches of rows that left or are about to be seated anew."""
        for row in rows:
            self._rows.pop(row, None)

    def run(self, row: int, start: int, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Continue `row`, which has `start` tokens behind it. Returns hidden_TD.

        Raises:
            RuntimeError: the row's cache does not hold exactly `start` tokens; its request must be
                computed again from its first token.
        """
        if start == 0:
            self._rows[row] = _Row(self._new_cache())
        state = self._rows.get(row)
        if state is None or state.length != start:
            have = "no cache" if state is None else f"a cache of {state.length} tokens"
            raise RuntimeError(f"row {row} continues at token {start} but has {have}")
        state.length = -1  # until the pass is through; a failed pass leaves the cache unusable
        step = 1 if self.one_by_one and start else len(ids_T)
        parts = []
        for at in range(0, len(ids_T), step):
            hidden_1TD, state.cache = self._forward(
                ids_T[None, at : at + step], positions_T[None, at : at + step], state.cache
            )
            parts.append(hidden_1TD[0])
        state.length = start + len(ids_T)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
