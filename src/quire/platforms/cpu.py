"""The CPU: the platform that every other is compared with.

Knows what `detect.py` found out, as torch names it, and how many threads pay. Does not know models or kernels.
"""

from __future__ import annotations

import torch

from quire import env
from quire.platforms import detect
from quire.platforms.base import Memory
from quire.platforms.cpu_affinity import threads_here

SMALL = 64 << 20
"""Bytes of weights that one thread reads in a few milliseconds. Below, a team gains less than its barriers cost, and
next to another busy process each of its ~10 regions a layer may wait a scheduler's slice (measured with a model of
0.5 MB on 2 busy cores: 120 ms a step with two threads, 2 ms with one)."""


class CpuPlatform:
    """See `Platform`."""

    name = "cpu"
    device = torch.device("cpu")
    attention: tuple[str, ...] = ("CPU_ATTN", "TORCH_SDPA")
    kernels: tuple[str, ...] = ("native", "pieces", "reference")

    def __init__(self) -> None:
        # With several threads MKL splits the sums of small products, so that a row's float32 bits would
        # depend on how many rows there are. This mode does not, and from 16 rows on it costs nothing
        # (measured). It is read before the process's first product; a program that has one keeps its own.
        if env.outer("MKL_CBWR") is None:
            env.set_outer("MKL_CBWR", "AUTO,STRICT")
        found = detect.cpu_facts()
        self._facts = found
        self.description = found.name
        self.default_depth = found.depth
        self.default_block_size = found.block_size
        self.default_num_batched_tokens = found.num_batched_tokens

    def use_threads(self, weight_bytes: int) -> int:
        """Set how many threads an operation may use, for a model of so many bytes; the number.

        OMP_NUM_THREADS, where set, is the last word; a program that has set fewer keeps them.
        """
        if env.outer("OMP_NUM_THREADS") is None:
            most = 1 if weight_bytes < SMALL else threads_here()
            if most < torch.get_num_threads():
                torch.set_num_threads(most)
        return torch.get_num_threads()

    def prepare(self, weight_bytes: int) -> None:
        self.use_threads(weight_bytes)

    def memory(self) -> Memory:
        return Memory(*detect.memory())

    def plannable(self, forecast: Memory, tables: int) -> Memory:
        return forecast

    def check_room(self, needed: int) -> None:
        """Pages are there when they are touched: the plan has counted them."""

    def recorder(self) -> None:
        return None

    def copier(self) -> None:
        return None

    def supports(self, dtype: str) -> bool:
        return dtype in self._facts.dtypes

    def preferred_dtype(self, checkpoint: str) -> str:
        return self._facts.preferred_dtype(checkpoint)
