"""How ranks share the experts of a mixture layer: a part of every expert each, or whole experts each.

Knows weights, seats (parallel/expert_placement.py) and the exchange. Does not know routers or checkpoints. All ranks have all tokens,
so each knows which pairs of a token and an expert every rank computes. The outputs of a token's experts are added in the
router's order on every rank, which is the order of one process: the bits are the same.

Shape suffixes: T tokens, D features, I inner features, K experts of a token, P = T * K pairs, N pairs of this rank, R ranks, M most
pairs of a rank, E experts, E1 = E + 1, S seats, C chunks, B bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire.layers.engine_experts import EngineExperts
from quire.layers.pair_outputs import gathered_pairs, outputs_of_seats
from quire.layers.weights import WeightRef
from quire.ops.experts import ExpertWeights, expert_products, weighted_sum
from quire.parallel.expert_placement import Placement, expert_options, placement
from quire.parallel.ranks import OutputSlice, RankGroup, current_ranks, output_slices

CHUNK = 1 << 16
"""Bytes of an expert's weights that ranks exchange as one row."""


class CutExperts:
    """Each rank has the same part of every expert's outputs, as of any other weight."""

    def __init__(self, ranks: RankGroup, inner: OutputSlice, out: OutputSlice):
        self.ranks, self.inner, self.out = ranks, inner, out

    def __call__(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert_weights: ExpertWeights
    ) -> Tensor:
        """y_TD, as `experts` (ops/experts.py)."""
        if not len(x_TD):
            return torch.zeros_like(x_TD)
        ids_P = ids_TK.flatten()
        inner_PI = self.ranks.gather(expert_products(x_TD, ids_P, expert_weights, False))
        y_PD = expert_products(inner_PI, ids_P, expert_weights, True)
        return self.ranks.gather(weighted_sum(y_PD.view(*ids_TK.shape, -1), weights_TK))

    def exchanges(self, tokens: int, chosen: int, features: int) -> list[tuple[int, int]]:
        """Rows and features of a rank's part in each exchange."""
        return [(tokens * chosen, self.inner.length), (tokens, self.out.length)]


class PlacedExperts:
    """Each rank has whole experts.

    Attributes:
        experts: of this rank's seats.
        first_E1, seats_S2: the copies of expert e are seats first_E1[e] to first_E1[e + 1]: a rank, and a number there.
        loads_E: the pairs of each expert up to now. Kernels keep the addresses of these three (kernels/mixture.cpp).
    """

    def __init__(self, ranks: RankGroup, where: Placement):
        self.ranks = ranks
        self.num_experts, seats = 1 + max(map(max, where)), sum(map(len, where))
        with torch.device("cpu"):  # layers are constructed on "meta"
            self.first_E1 = torch.zeros(self.num_experts + 1, dtype=torch.int64)
            self.seats_S2 = torch.zeros(seats, 2, dtype=torch.int64)
            self.loads_E = torch.zeros(self.num_experts, dtype=torch.int64)
        self.place(where)

    def place(self, where: Placement) -> None:
        """The seats have these experts from now on."""
        self.where, self.experts = where, where[self.ranks.rank]
        seats = sorted(
            (expert, rank, seat)
            for rank, experts in enumerate(where)
            for seat, expert in enumerate(experts)
        )
        seats_S3 = torch.tensor(seats, device="cpu")
        self.first_E1[1:] = seats_S3[:, 0].bincount().cumsum(0)
        self.seats_S2.copy_(seats_S3[:, 1:])

    def seats_of(self, ids_P: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
        """The rank and the seat of each pair; copies of an expert take turns from token to token, which have `chosen` pairs each."""
        first_P = self.first_E1[ids_P]
        copies_P = self.first_E1[ids_P + 1] - first_P
        turns_P = torch.arange(len(ids_P)) // chosen % copies_P
        rank_P, seat_P = self.seats_S2[first_P + turns_P].unbind(1)
        return rank_P, seat_P

    def __call__(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert_weights: ExpertWeights
    ) -> Tensor:
        """y_TD, as `experts` (ops/experts.py)."""
        if not len(x_TD):
            return torch.zeros_like(x_TD)
        ids_P = ids_TK.flatten()
        self.loads_E += ids_P.bincount(minlength=self.num_experts)
        rank_P, seat_P = self.seats_of(ids_P, ids_TK.shape[1])
        (own_N,) = (rank_P == self.ranks.rank).nonzero(as_tuple=True)
        y_ND = outputs_of_seats(x_TD[own_N // ids_TK.shape[1]], seat_P[own_N], expert_weights)
        y_PD = gathered_pairs(y_ND, rank_P, self.ranks)
        return weighted_sum(y_PD.view(*ids_TK.shape, -1), weights_TK)

    def exchanges(self, tokens: int, chosen: int, features: int) -> list[tuple[int, int]]:
        """As of `CutExperts`, if every rank has about as many pairs."""
        return [(-(-tokens * chosen // self.ranks.size), features)]

    def move(self, where: Placement, refs: Sequence[Sequence[WeightRef]]) -> int:
        """Give the seats these experts, whose weights come from ranks that have them; the number of seats that changed.

        Args:
            of: the weights of each seat.
        """
        source = {e: rank for rank in reversed(range(len(where))) for e in self.where[rank]}
        missing = [
            [e for e in new if e not in old] for new, old in zip(where, self.where, strict=True)
        ]
        sent: list[list[int]] = [[] for _ in where]
        for e in dict.fromkeys(e for each in missing for e in each):
            sent[source[e]].append(e)
        seat_of = {e: seat for seat, e in enumerate(self.experts)}
        num_bytes = sum(t.nbytes for t in _tensors(refs[0]))
        arrived: dict[int, Tensor] = {}
        for turn in range(max(map(len, sent))):
            own = sent[self.ranks.rank][turn : turn + 1]
            packed_B = _packed(refs[seat_of[own[0]]] if own else (), num_bytes)
            all_BRC = self.ranks.gather(packed_B.view(-1, CHUNK)).view(-1, self.ranks.size, CHUNK)
            for rank, experts in enumerate(sent):
                if turn < len(experts) and experts[turn] in missing[self.ranks.rank]:
                    arrived[experts[turn]] = all_BRC[:, rank].flatten()[:num_bytes]
        changed = [
            (seat, e)
            for seat, (e, old) in enumerate(zip(where[self.ranks.rank], self.experts, strict=True))
            if e != old
        ]
        for _, e in changed:  # from another seat of this rank
            if e not in arrived:
                arrived[e] = _packed(refs[seat_of[e]], num_bytes)[:num_bytes]
        for seat, e in changed:
            _unpack(arrived[e], refs[seat])
        self.place(where)
        return len(changed)


Split = CutExperts | PlacedExperts | EngineExperts


def split_experts(num_in: int, inner: int, num_experts: int) -> Split | None:
    """How ranks and engines share experts of these sizes; None: there are no others, or each has all of the experts.

    Experts are cut where that is not asked otherwise. Experts whose sizes do not divide into whole panels are placed.

    Raises:
        ConfigError: the number of whole experts cannot be shared by the ranks.
    """
    ranks, options = current_ranks(), expert_options()
    if options.engines > 1:
        size = options.engines * (1 if ranks is None else ranks.size)
        return EngineExperts(ranks, placement(num_experts, size, options), options.engine)
    if ranks is None:
        return None
    cuts = *output_slices(inner), *output_slices(num_in)
    if len(cuts) == 2 and not options.whole:
        return CutExperts(ranks, *cuts)
    if num_experts < ranks.size and not options.whole:
        return None
    return PlacedExperts(ranks, placement(num_experts, ranks.size, options))


def can_move(of: Sequence[Sequence[WeightRef]]) -> bool:
    """Whether the weights of all seats are tensors of the same shapes and types, so that one can take the place of another."""
    shapes = {
        tuple(
            (type(ref.prepared), *((t.tensor.shape, t.tensor.dtype) for t in ref.tensors()))
            for ref in refs
        )
        for refs in of
    }
    return len(shapes) == 1 and all(
        len(ref.tensors()) > (ref.bias is not None) for refs in of for ref in refs
    )


def _tensors(refs: Iterable[WeightRef]) -> list[Tensor]:
    return [each.tensor for ref in refs for each in ref.tensors()]


def _packed(refs: Iterable[WeightRef], num_bytes: int) -> Tensor:
    """The bytes of an expert's weights, and zeros up to whole chunks."""
    packed_B = torch.zeros(-(-num_bytes // CHUNK) * CHUNK, dtype=torch.uint8)
    start = 0
    for tensor in _tensors(refs):
        packed_B[start : start + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
        start += tensor.nbytes
    return packed_B


def _unpack(packed_B: Tensor, refs: Iterable[WeightRef]) -> None:
    """Store the bytes in the weights. Kernels keep the addresses of prepared weights; other tensors may be views of a mapped file."""
    start = 0
    for ref in refs:
        for each in ref.tensors():
            tensor = each.tensor
            part_B = packed_B[start : start + tensor.nbytes].clone()
            start += tensor.nbytes
            part = part_B.view(tensor.dtype).view(tensor.shape)
            if ref.prepared is None:
                each.set(part)
            else:
                tensor.copy_(part)
