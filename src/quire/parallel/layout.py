"""RankLayout: the ranks of an engine as stages of a pipeline, parts of a context, and parts of layers.

Knows numbers. Ranks that exchange most are neighbours: from slowest to fastest a rank's number counts the stage, the part of
the context, and the part of the layers. No torch here.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import Struct

from quire.config.parallel.parallel_config import ParallelConfig
from quire.config.parallel.ranks import PARTITION, layer_partition
from quire.errors import ConfigError


class RankPlace(NamedTuple):
    """The stage, the part of the context and the part of each layer that one rank has."""

    stage: int = 0
    part: int = 0
    tensor: int = 0


class RankLayout(Struct, array_like=True, frozen=True):
    """The number of stages, of parts of a context, and of parts of each layer.

    partition: the number of layers of each stage; empty: as equal as possible. decode: the number of ranks that keep a part of
    the blocks of one KV cache each: the ranks of all parts of a context, and neighbours among the ranks that split a layer.
    """

    pipeline: int = 1
    prefill: int = 1
    tensor: int = 1
    partition: tuple[int, ...] = ()
    decode: int = 1

    @classmethod
    def of(cls, config: ParallelConfig) -> RankLayout:
        """The layout that the user chose. Raises ConfigError: the layers of the stages are malformed."""
        stages = config.pipeline_parallel_size
        sizes = stages, config.prefill_context_parallel_size, config.tensor_parallel_size
        return cls(*sizes, layer_partition(stages), config.decode_context_parallel_size)

    @property
    def size(self) -> int:
        return self.pipeline * self.prefill * self.tensor

    @property
    def of_one_stage(self) -> RankLayout:
        """The same, for a model of which one stage has all layers."""
        return msgspec.structs.replace(self, pipeline=1, partition=())

    def place(self, rank: int) -> RankPlace:
        above, tensor = divmod(rank, self.tensor)
        return RankPlace(*divmod(above, self.prefill), tensor)

    def rank(self, place: RankPlace) -> int:
        return (place.stage * self.prefill + place.part) * self.tensor + place.tensor

    def tensor_group(self, rank: int) -> list[int]:
        """The ranks that split each layer with this one."""
        place = self.place(rank)
        return [self.rank(place._replace(tensor=number)) for number in range(self.tensor)]

    def context_group(self, rank: int) -> list[int]:
        """The ranks that have the same part of the same layers, for other parts of a context."""
        place = self.place(rank)
        return [self.rank(place._replace(part=number)) for number in range(self.prefill)]

    @property
    def keepers(self) -> int:
        """How many neighbours among the ranks that split a layer keep the blocks of the same KV heads."""
        return max(1, self.decode // self.prefill)

    def blocks_group(self, rank: int) -> list[int]:
        """The ranks that keep the blocks of the same KV heads."""
        place = self.place(rank)
        first = place.tensor // self.keepers * self.keepers
        parts = range(self.prefill) if self.decode > 1 else (place.part,)
        return [
            self.rank(RankPlace(place.stage, part, number))
            for part in parts
            for number in range(first, first + self.keepers)
        ]

    def stage_group(self, rank: int) -> list[int]:
        """The ranks with the same parts in all stages, the first stage first."""
        place = self.place(rank)
        return [self.rank(place._replace(stage=number)) for number in range(self.pipeline)]

    @property
    def answering(self) -> list[int]:
        """The ranks that draw tokens: the last stage's. The first of them answers the engine."""
        return list(range(self.size - self.prefill * self.tensor, self.size))

    def layers(self, stage: int, total: int) -> range:
        """The layers of a stage, of `total`.

        Without a partition each stage has the same number. Those that remain go to the stages before the last one, one each:
        the last has the LM head too.

        Raises:
            ConfigError: there are more stages than layers, or the partition has another number of layers.
        """
        if self.pipeline > total:
            raise ConfigError(
                f"pipeline_parallel_size={self.pipeline} is more than the {total} layers of the model; use {total} or less"
            )
        counts = list(self.partition) or [total // self.pipeline] * self.pipeline
        if self.partition and sum(counts) != total:
            raise ConfigError(
                f"{PARTITION}={','.join(map(str, counts))} has {sum(counts)} layers, and the model has {total}; change the"
                " numbers, or unset it"
            )
        for stage_before in range(self.pipeline - 1 - (total - sum(counts)), self.pipeline - 1):
            counts[stage_before] += 1
        start = sum(counts[:stage])
        return range(start, start + counts[stage])


FIRST, ONE_RANK = RankPlace(), RankLayout()
