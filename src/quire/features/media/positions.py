"""Rotary positions of a prompt with pictures and videos, for models whose positions have time, height and width (M-RoPE).

Sound counts as text does: an item without grids moves nothing.

A pure function of the places and grids of the pictures, so a cached prefix or a preemption shifts nothing. What follows a grid begins
after its largest position, also if that is a time: so the models were trained. (Transformers 5.24 begins after the largest of height
and width, where times of a longer video would be used twice.)
Source: Qwen2-VL (arXiv 2409.12191).

Shape suffixes: L tokens of the prompt, C components (3), N tokens of a picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.protocol.media import TowerInput


def item_positions(items: Sequence[tuple[int, TowerInput]]) -> tuple[np.ndarray, int]:
    """`items`: each with the index of its first token. Returns (positions_LC of the tokens up to the end of the last grid, the offset of all later tokens from their index)."""
    parts: list[np.ndarray] = []
    index = position = 0
    for first, item in items:
        if not item.grids:
            continue
        for (offset, length), grid in zip(item.runs, item.grids, strict=True):
            start = first + offset
            text = np.arange(start - index) + position
            parts.append(np.stack([text] * 3, 1))
            position += start - index
            index = start + length
            own_NC = grid_positions(grid, item.interval)
            parts.append(own_NC + position)
            position += int(own_NC.max()) + 1
    positions_LC = np.concatenate(parts) if parts else np.zeros((0, 3), np.int64)
    return positions_LC, position - index


def grid_positions(grid: tuple[int, int, int], interval: float = 1.0) -> np.ndarray:
    """[N, C] of the rows of a grid, from 0: time, height, width. `interval`: of time."""
    counts_CTHW = np.indices(grid)
    counts_CTHW[0] = (counts_CTHW[0].astype(np.float32) * np.float32(interval)).astype(np.int64)
    return counts_CTHW.reshape(3, -1).T
