"""The CPU platform, which tests compare other platforms with.

Knows the facts of `detect.py`, torch's settings, and how many threads to use. Does not know models or kernels.
"""

from __future__ import annotations

import torch

from quire import env
from quire.platforms import detect
from quire.platforms.base import Memory
from quire.platforms.cpu_affinity import threads_here

SMALL = 64 << 20
"""Bytes of weights that one thread reads in a few milliseconds. Below it, several threads gain less than their barriers
cost. Beside another busy process, each of ~10 parallel regions per layer may wait for a time slice of the kernel's
scheduler (a model of 0.5 MB on 2 busy cores: 120 ms per step with two threads, 2 ms with one)."""


class CpuPlatform:
    """See `Platform`."""

    name = "cpu"
    device = torch.device("cpu")
    attention: tuple[str, ...] = detect.ATTENTION["cpu"]
    kernels: tuple[str, ...] = ("native", "reference")

    def __init__(self) -> None:
        # With several threads, MKL splits the sums of small products, so a row's float32 bits depend on the
        # number of rows. This mode prevents it, and costs nothing from 16 rows on (measured). MKL reads the
        # variable at the process's first product; a value that the user has set stays.
        if env.outer("MKL_CBWR") is None:
            env.set_outer("MKL_CBWR", "AUTO,STRICT")
        found = detect.cpu_facts()
        self._facts = found
        self.description = found.name
        self.default_depth = found.depth
        self.default_block_size = found.block_size
        self.default_num_batched_tokens = found.num_batched_tokens

    def use_threads(self, weight_bytes: int) -> int:
        """Set the number of threads of an operation for a model of this many bytes; return the number in effect.

        OMP_NUM_THREADS has precedence; a smaller number that the program has set stays.
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
        """Do nothing: Linux provides pages at first touch, and the memory plan has counted them."""

    def graph_capturer(self) -> None:
        return None

    def copier(self) -> None:
        return None

    def supports(self, dtype: str) -> bool:
        return dtype in self._facts.dtypes

    def preferred_dtype(self, checkpoint: str) -> str:
        return self._facts.preferred_dtype(checkpoint)
