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

WEIGHTED, ALL = "WEIGHTEDMEAN", "ALL"


class PooledStates:
    """The pooled states of one request.

    Args:
        poolers: the names of its task's poolers; ALL keeps each token.
        first: the first position that counts.
        only: keep just these positions, ascending, for ALL; None: every one.
    """

    def __init__(self, poolers: Collection[str], first: int = 0, only: Sequence[int] | None = None):
        self.poolers, self.first, self.only = poolers, first, only
        self.count, self.weight = 0, 0.0
        self._states_D: dict[str, Tensor] = {}  # by pooler
        self._sums_1D: dict[str, np.ndarray] = {}  # by pooler that takes a mean
        self._all: list[Tensor] = []

    def add(self, hidden_ND: Tensor, start: int) -> None:
        """Add the hidden states of the positions from `start` on; chunks come in order. The tensor may be reused."""
        if start < self.first:
            hidden_ND = hidden_ND[self.first - start :]
            start = self.first
        if not len(hidden_ND):
            return
        states_D = self._states_D
        for pooler in set(self.poolers):
            match pooler:
                case "CLS":
                    states_D.setdefault("CLS", _copy(hidden_ND[0]))
                case "LAST":
                    states_D["LAST"] = _copy(hidden_ND[-1])
                case "MAX":
                    most_D = hidden_ND.float().amax(0)
                    states_D["MAX"] = torch.maximum(states_D.get("MAX", most_D), most_D)
                case "ALL":
                    self._keep(hidden_ND, start)
                case _:
                    self._add_up(pooler, hidden_ND, start)
        self.count += len(hidden_ND)

    def _keep(self, hidden_ND: Tensor, start: int) -> None:
        if self.only is not None:
            end = start + len(hidden_ND)
            places = [position - start for position in self.only if start <= position < end]
            hidden_ND = hidden_ND[places]
        if len(hidden_ND):
            self._all.append(_copy(hidden_ND))

    def _add_up(self, pooler: str, hidden_ND: Tensor, start: int) -> None:
        """Add the rows one after another: numpy adds the rows of the outer dimension in their order."""
        x_ND = hidden_ND.detach().to("cpu", torch.float32).numpy()
        if pooler == WEIGHTED:
            weights_N = np.arange(start + 1, start + len(x_ND) + 1, dtype=np.float32)
            self.weight += float(weights_N.sum(dtype=np.float64))
            x_ND = x_ND * weights_N[:, None]
        sum_1D = self._sums_1D.get(pooler, np.zeros((1, x_ND.shape[1]), np.float32))
        self._sums_1D[pooler] = np.add.reduce(np.concatenate((sum_1D, x_ND)), axis=0, keepdims=True)

    def parts(self, device: torch.device) -> list[Tensor]:
        """The pooled states [D] of each sequence pooler, in float32."""
        count = np.float32(self.count)
        by = {"MEAN": count, "MEAN_SQRT_LEN": np.sqrt(count), WEIGHTED: np.float32(self.weight)}
        means = {name: torch.from_numpy(x_1D[0] / by[name]) for name, x_1D in self._sums_1D.items()}
        pooled = self._states_D | means
        return [pooled[name].to(device) for name in self.poolers if name in pooled]

    def tokens(self, like: Tensor) -> Tensor:
        """hidden_ND of every token that was kept, in float32; `like`: has the device and the width of none."""
        if not self._all:
            return torch.empty((0, like.shape[-1]), dtype=torch.float32, device=like.device)
        return self._all[0] if len(self._all) == 1 else torch.cat(self._all)


def _copy(x: Tensor) -> Tensor:
    """A float32 copy: the model may overwrite its output in the next step."""
    return x.to(torch.float32, copy=True)
