"""One number of threads for all ranks: the one with the fewest sets the pace, and the others would only wait."""

from __future__ import annotations

import torch

from quire.parallel.ranks import Ranks


def use_same_threads(ranks: Ranks) -> None:
    """Take the least number of threads among the ranks."""
    (least,) = ranks.least([torch.get_num_threads()])
    torch.set_num_threads(least)
