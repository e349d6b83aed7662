"""How engines of data parallelism share the experts of a mixture layer: each has whole experts, and asks the others for theirs.

Knows which worker has which expert. Does not know how another engine is asked (`parallel/expert_sockets.py`). A worker is one rank of
one engine. The ranks of an engine have all of its tokens: each computes, or gets from the same rank of another engine, the outputs of
the pairs whose experts such a rank has; then the ranks gather them. No output depends on the worker that computes it, and a
token's outputs are added in the router's order, so one engine gives the same bits.

Shape suffixes: T tokens, D features, K experts of a token, P = T * K pairs of a token and an expert, N pairs of this rank, E experts.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.errors import ExpertsLost
from quire.layers.pair_outputs import gathered_pairs, outputs_of_seats
from quire.ops.experts import ExpertWeights, weighted_sum
from quire.parallel.expert_placement import Placement
from quire.parallel.ranks import RankGroup

LOST = "an engine that has experts of this model does not answer; the log of this engine says which"


class Asked(Protocol):
    """A question to another engine that is on its way."""

    def answer(self) -> Tensor:
        """y_ND: of each row, the output of the expert in its seat. Raises ExpertsLost: the engine does not answer in time."""
        ...


class OtherEngines(Protocol):
    """The same rank of the other engines."""

    def ask(self, engine: int, layer: int, seat_N: Tensor, x_ND: Tensor) -> Asked: ...


class EngineExperts:
    """The experts of this worker, and where the others are.

    Args:
        ranks: of this engine; None: there is one.
        where: the experts of the seats of each worker; the workers of engine 0 come first.
        engine: number of this one.

    Attributes:
        experts: of this worker's seats.
        layer: the number of this layer among those whose experts are shared.
        others: set before the first step.
    """

    def __init__(self, ranks: RankGroup | None, where: Placement, engine: int):
        self.ranks, self.engine, self.layer = ranks, engine, 0
        self.others: OtherEngines | None = None
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self.experts = where[engine * self.size + self.rank]
        with torch.device("cpu"):  # layers are constructed on "meta"
            self.worker_E = torch.zeros(sum(map(len, where)), dtype=torch.int64)
            self.seat_E = torch.zeros_like(self.worker_E)
        for worker, experts in enumerate(where):
            for seat, expert in enumerate(experts):
                self.worker_E[expert], self.seat_E[expert] = worker, seat

    def __call__(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert_weights: ExpertWeights
    ) -> Tensor:
        """y_TD, as `experts` (ops/experts.py). Raises ExpertsLost: another engine does not answer in time."""
        if not len(x_TD):
            return torch.zeros_like(x_TD)
        ids_P = ids_TK.flatten()
        worker_P = self.worker_E[ids_P]
        rank_P = worker_P % self.size
        (own_N,) = (rank_P == self.rank).nonzero(as_tuple=True)
        x_ND, seat_N = x_TD[own_N // ids_TK.shape[1]], self.seat_E[ids_P[own_N]]
        engine_N = worker_P[own_N] // self.size
        if self.ranks is None:
            y_PD = self._outputs(x_ND, seat_N, engine_N, expert_weights)
        else:
            y_PD = self._of_all_ranks(x_ND, seat_N, engine_N, expert_weights, rank_P, self.ranks)
        return weighted_sum(y_PD.view(*ids_TK.shape, -1), weights_TK)

    def _outputs(
        self, x_ND: Tensor, seat_N: Tensor, engine_N: Tensor, expert_weights: ExpertWeights
    ) -> Tensor:
        """y_ND of this rank's pairs. Other engines compute theirs meanwhile."""
        y_ND = torch.empty_like(x_ND)
        asked: list[tuple[Tensor, Asked]] = []
        for engine in engine_N.unique().tolist():
            if engine != self.engine:
                if self.others is None:
                    raise ExpertsLost("this worker is not connected to the other engines")
                (theirs,) = (engine_N == engine).nonzero(as_tuple=True)
                ask = self.others.ask(engine, self.layer, seat_N[theirs], x_ND[theirs])
                asked.append((theirs, ask))
        (here,) = (engine_N == self.engine).nonzero(as_tuple=True)
        y_ND[here] = outputs_of_seats(x_ND[here], seat_N[here], expert_weights)
        for theirs, ask in asked:
            y_ND[theirs] = ask.answer()
        return y_ND

    def _of_all_ranks(
        self, x_ND: Tensor, seat_N: Tensor, engine_N: Tensor, expert_weights: ExpertWeights, rank_P: Tensor, ranks: RankGroup
    ) -> Tensor:  # fmt: skip
        """y_PD of the pairs of all ranks. If one rank lost another engine, all raise the same error, and their engine goes on."""
        lost: ExpertsLost | None = None
        try:
            y_ND = self._outputs(x_ND, seat_N, engine_N, expert_weights)
        except ExpertsLost as error:
            lost, y_ND = error, torch.zeros_like(x_ND)
        if ranks.gather(torch.tensor([[float(lost is not None)]])).any():
            raise ExpertsLost(LOST) from lost
        return gathered_pairs(y_ND, rank_P, ranks)

    def exchanges(self, tokens: int, chosen: int, features: int) -> list[tuple[int, int]]:
        """Rows and features of a rank's part in each exchange with the others of its engine."""
        return [] if self.ranks is None else [(-(-tokens * chosen // self.size), features)]
