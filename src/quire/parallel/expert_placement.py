"""Which rank holds which experts of a mixture layer, and how copies of busy experts are distributed.

Knows numbers of experts and loads. Does not know weights. A seat is the place of one expert's weights; all seats of rank 0 come
first. The same experts give the same placement on every rank, so that ranks need not ask each other.

Source: EPLB of DeepSeek-V3 (arXiv 2412.19437, section 3.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from quire.config.engine_experts import engines_share_experts
from quire.config.parallel.experts import eplb_options
from quire.config.parallel.parallel_config import ParallelConfig
from quire.errors import ConfigError


class ExpertOptions(NamedTuple):
    """How ranks share the experts.

    `whole`: each rank has whole experts, not a part of each. `round_robin`: neighbouring experts are on different ranks.
    `copies`: seats beside one for each expert. `moves`: experts may change their seats later. `engines`: how many engines of data
    parallelism share the experts; this is number `engine`.
    """

    whole: bool = False
    round_robin: bool = False
    copies: int = 0
    moves: bool = False
    engines: int = 1
    engine: int = 0

    @classmethod
    def of(cls, config: ParallelConfig) -> ExpertOptions:
        """Raises ConfigError: options contradict each other."""
        eplb, strategy = eplb_options(config), config.expert_placement_strategy
        copies = 0 if eplb is None else eplb.num_redundant_experts
        whole = config.enable_expert_parallel
        values = whole, strategy == "round_robin", copies, eplb is not None
        if not engines_share_experts(config):
            return cls(*values)
        return cls(*values, config.data_parallel_size, config.data_parallel_rank or 0)


_options: ContextVar[ExpertOptions | None] = ContextVar("expert_options", default=None)


@contextmanager
def sharing_experts(options: ExpertOptions) -> Iterator[None]:
    """Inside, mixture layers are constructed with these options."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def expert_options() -> ExpertOptions:
    """Of the layers under construction."""
    return _options.get() or ExpertOptions()


Placement = tuple[tuple[int, ...], ...]
"""The experts of each rank's seats."""


def placement(num_experts: int, num_ranks: int, options: ExpertOptions) -> Placement:
    """Where experts are at first. If they do not divide, the first ranks have one more.

    Raises:
        ConfigError: fewer experts than ranks, or seats that may change but do not divide.
    """
    if num_experts < num_ranks:
        of_engine = max(1, num_experts // options.engines)
        raise ConfigError(
            f"enable_expert_parallel: {num_experts} experts cannot be placed on {num_ranks} ranks; use"
            f" --tensor-parallel-size {of_engine} or less, or leave --enable-expert-parallel out"
        )
    per_rank, more = divmod(num_experts + options.copies, num_ranks)
    if more and options.moves:
        raise ConfigError(
            f"eplb_config: {num_experts} experts and {options.copies} redundant ones make {num_experts + options.copies}"
            f" seats, which {num_ranks} ranks cannot share equally; use num_redundant_experts={options.copies + num_ranks - more}"
        )
    if per_rank + bool(more) > num_experts:
        raise ConfigError(
            f"eplb_config: num_redundant_experts={options.copies} gives a rank more seats than there are experts; use at"
            f" most {num_experts * (num_ranks - 1)}"
        )
    size, extra = divmod(num_experts, num_ranks)
    starts = [rank * size + min(rank, extra) for rank in range(num_ranks + 1)]
    by_rank, copied = [], 0
    for rank in range(num_ranks):
        linear = range(starts[rank], starts[rank + 1])
        experts = [*(range(rank, num_experts, num_ranks) if options.round_robin else linear)]
        while len(experts) < per_rank + (rank < more):
            if copied % num_experts not in experts:
                experts.append(copied % num_experts)
            copied += 1
        by_rank.append(tuple(experts))
    return tuple(by_rank)


def replicas(loads: Sequence[float], num_seats: int) -> list[int]:
    """How many seats each expert gets: one more, again and again, for the largest load of a seat."""
    counts = [1] * len(loads)
    for _ in range(num_seats - len(loads)):
        busiest = max(range(len(loads)), key=lambda e: (loads[e] / counts[e], -e))
        counts[busiest] += 1
    return counts


def packed(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    """Items in packs of the same length: the heaviest first, each into the lightest pack that has room."""
    room = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        lightest = min(
            (p for p in range(num_packs) if len(packs[p]) < room), key=totals.__getitem__
        )
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs


def balanced(
    loads: Sequence[float], before: Placement, *, nodes: int = 1, groups: int = 1
) -> Placement:
    """A placement with about the same load on every rank, in which many seats keep their expert; `before` if none is better.

    Args:
        loads: tokens of each expert.
        before: the placement now; all ranks have the same number of seats.
        nodes: machines; ranks of one are neighbours. groups: of experts that the router chooses together; groups stay on
            one machine if the machines divide their number.
    """
    ranks, seats = len(before), len(before[0])
    if groups % nodes or ranks % nodes:
        nodes = groups = 1
    size, packs_found = len(loads) // groups, list[tuple[int, ...]]()
    by_group = [sum(loads[g * size : (g + 1) * size]) for g in range(groups)]
    for node, chosen in enumerate(packed(by_group, nodes)):
        there = before[node * ranks // nodes : (node + 1) * ranks // nodes]
        experts = [g * size + i for g in sorted(chosen) for i in range(size)]
        packs_found += _with_old_seats(_on_ranks(experts, loads, len(there), seats), there)
    new_load, now = (max(load_of_ranks(loads, where)) for where in (tuple(packs_found), before))
    return tuple(packs_found) if new_load < now else before


def _on_ranks(
    experts: Sequence[int], loads: Sequence[float], ranks: int, seats: int
) -> list[list[int]]:
    """The experts of each rank."""
    counts = replicas([loads[e] for e in experts], ranks * seats)
    every = [(e, loads[e] / n) for e, n in zip(experts, counts, strict=True) for _ in range(n)]
    packs = packed([weight for _, weight in every], ranks)
    return [[every[item][0] for item in pack] for pack in packs]


def _with_old_seats(packs: list[list[int]], before: Placement) -> Placement:
    """The packs on the ranks that have most of their experts already, each of these in the seat that it has."""
    order, left = [], list(packs)
    for had in before:
        pack_of_rank = max(left, key=lambda pack: len(set(pack) & set(had)))
        left.remove(pack_of_rank)
        coming, seats = list(pack_of_rank), list[int | None]([None] * len(had))
        for seat, expert in enumerate(had):
            if expert in coming:
                seats[seat] = expert
                coming.remove(expert)
        order.append(tuple(coming.pop(0) if e is None else e for e in seats))
    return tuple(order)


def load_of_ranks(loads: Sequence[float], where: Placement) -> list[float]:
    """The tokens of each rank, where the copies of an expert share its tokens."""
    copies = [sum(seats.count(e) for seats in where) for e in range(len(loads))]
    return [sum(loads[e] / copies[e] for e in seats) for seats in where]


def balancedness(by_layer: Sequence[Sequence[float]]) -> float:
    """Of the ranks' loads in each layer: the sum of their means by the sum of their maxima; 1.0: all ranks have the same."""
    means = sum(sum(loads) / len(loads) for loads in by_layer)
    max_load = sum(max(loads) for loads in by_layer)
    return means / max_load if max_load else 1.0
