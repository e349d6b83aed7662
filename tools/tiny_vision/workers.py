"""The processes of one training run, each on its own core. The threads of a process wait for each other in every operation of a step; processes
wait for each other only when a step averages the gradients."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import distributed, nn


class Workers:
    """The processes of a training run: as many as `torchrun` started, or one without `torchrun`. No two processes draw the same pictures and texts."""

    def __init__(self) -> None:
        if "RANK" in os.environ:
            distributed.init_process_group("gloo")
        self.many = distributed.get_world_size() if distributed.is_initialized() else 1
        self.rank = distributed.get_rank() if self.many > 1 else 0

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give each process the mean of the gradients of all."""
        if self.many > 1:
            given = [p for p in parameters if p.grad is not None]
            together = torch.cat([p.grad.flatten().float() for p in given]) / self.many  # type: ignore[union-attr]
            distributed.all_reduce(together)
            for p, mean in zip(given, together.split([p.numel() for p in given]), strict=True):
                p.grad = mean.view_as(p).to(p.dtype)

    def most(self, *values: float) -> list[float]:
        """The largest of each value in the processes: all of them must decide alike."""
        said = torch.tensor(values, dtype=torch.float64)
        if self.many > 1:
            distributed.all_reduce(said, distributed.ReduceOp.MAX)
        return said.tolist()
