"""What a pooling request keeps of its hidden states between the chunks of its prompt.

Knows the poolers. Does not know rows, heads or results. Sums are float32, in the order of the positions, so that their bits do
not depend on how the prompt is cut.

Shape suffixes: D features, N tokens of a chunk or of the request, 1D one row before D.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

SUMS = frozenset({"MEAN", "MEAN_SQRT_LEN"})
WEIGHTED, MAX, ALL = "WEIGHTEDMEAN", "MAX", "ALL"


class PooledStates:
    """The pooled states of one request.

    Args:
        poolers: those of its task; ALL keeps each token.
        first: the first position that counts.
        only: keep just these positions, ascending, for ALL; None: every one.
    """

    __slots__ = (
        "_all",
        "_cls_D",
        "_last_D",
        "_max_D",
        "_sum_1D",
        "_weighted_1D",
        "count",
        "first",
        "only",
        "poolers",
        "weight",
    )

    def __init__(self, poolers: Collection[str], first: int = 0, only: Sequence[int] | None = None):
        self.poolers, self.first, self.only = poolers, first, only
        self.count, self.weight = 0, 0.0
        self._cls_D: Tensor | None = None
        self._last_D: Tensor | None = None
        self._max_D: Tensor | None = None
        self._sum_1D: np.ndarray | None = None
        self._weighted_1D: np.ndarray | None = None
        self._all: list[Tensor] = []

    def add(self, hidden_ND: Tensor, start: int) -> None:
        """Add the hidden states of the positions from `start` on; chunks come in order. The tensor may be reused."""
        if start < self.first:
            hidden_ND = hidden_ND[self.first - start :]
            start = self.first
        count = len(hidden_ND)
        if not count:
            return
        if self.count == 0 and "CLS" in self.poolers:
            self._cls_D = _copy(hidden_ND[0])
        if "LAST" in self.poolers:
            self._last_D = _copy(hidden_ND[-1])
        if ALL in self.poolers:
            self._keep(hidden_ND, start)
        if not SUMS.isdisjoint(self.poolers):
            self._sum_1D = _summed(self._sum_1D, _host(hidden_ND))
        if WEIGHTED in self.poolers:
            weights_N = np.arange(start + 1, start + count + 1, dtype=np.float32)
            self._weighted_1D = _summed(self._weighted_1D, _host(hidden_ND) * weights_N[:, None])
            self.weight += float(weights_N.sum(dtype=np.float64))
        if MAX in self.poolers:
            most_D = hidden_ND.float().amax(0)
            self._max_D = most_D if self._max_D is None else torch.maximum(self._max_D, most_D)
        self.count += count

    def _keep(self, hidden_ND: Tensor, start: int) -> None:
        if self.only is not None:
            end = start + len(hidden_ND)
            places = [position - start for position in self.only if start <= position < end]
            hidden_ND = hidden_ND[places]
        if len(hidden_ND):
            self._all.append(_copy(hidden_ND))

    def parts(self, device: torch.device) -> list[Tensor]:
        """The pooled states [D] of each sequence pooler, in float32."""
        found = []
        for name in self.poolers:
            value: Tensor | None = None
            if name == "CLS":
                value = self._cls_D
            elif name == "LAST":
                value = self._last_D
            elif name == MAX:
                value = self._max_D
            elif name == WEIGHTED and self._weighted_1D is not None:
                value = torch.from_numpy(self._weighted_1D[0] / np.float32(self.weight))
            elif name in SUMS and self._sum_1D is not None:
                by = np.float32(self.count)
                value = torch.from_numpy(self._sum_1D[0] / (by if name == "MEAN" else np.sqrt(by)))
            if value is not None:
                found.append(value.to(device))
        return found

    def tokens(self, like: Tensor) -> Tensor:
        """hidden_ND of every token that was kept, in float32; `like`: has the device and the width of none."""
        if not self._all:
            return torch.empty((0, like.shape[-1]), dtype=torch.float32, device=like.device)
        return self._all[0] if len(self._all) == 1 else torch.cat(self._all)


def _copy(x: Tensor) -> Tensor:
    """A float32 copy: the model may overwrite its output in the next step."""
    return x.to(torch.float32, copy=True)


def _host(x_ND: Tensor) -> np.ndarray:
    found: np.ndarray = x_ND.detach().to("cpu", torch.float32).numpy()
    return found


def _summed(sum_1D: np.ndarray | None, x_ND: np.ndarray) -> np.ndarray:
    """The sum so far plus each row of x, one after another: numpy adds the rows of the outer dimension in their order."""
    if sum_1D is None:
        sum_1D = np.zeros((1, x_ND.shape[1]), np.float32)
    total_1D: np.ndarray = np.add.reduce(np.concatenate((sum_1D, x_ND)), axis=0, keepdims=True)
    return total_1D
