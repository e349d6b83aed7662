"""The CPU: the platform that every other is compared with.

Knows what `facts.py` found out, as torch names it. Does not know models or kernels.
"""

from __future__ import annotations

import torch

from quire.platforms import facts
from quire.platforms.base import Memory


class CpuPlatform:
    """See `Platform`."""

    name = "cpu"
    device = torch.device("cpu")
    attention: tuple[str, ...] = ("TORCH_SDPA",)
    kernels: tuple[str, ...] = ("native", "reference")

    def __init__(self) -> None:
        found = facts.cpu_facts()
        self._facts = found
        self.description = found.name
        self.default_depth = found.depth
        self.default_block_size = found.block_size
        self.default_num_batched_tokens = found.num_batched_tokens

    def memory(self) -> Memory:
        return Memory(*facts.memory())

    def supports(self, dtype: str) -> bool:
        return dtype in self._facts.dtypes

    def preferred_dtype(self, checkpoint: str) -> str:
        return self._facts.preferred_dtype(checkpoint)
