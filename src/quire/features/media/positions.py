"""Rotary positions of a prompt with pictures, for models whose positions have time, height and width (M-RoPE).

A pure function of the places and grids of the pictures, so a cached prefix or a preemption shifts nothing.
Source: Qwen2-VL (arXiv 2409.12191).

Shape suffixes: L tokens of the prompt, C components (3), N tokens of a picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.protocol.media import Picture


def picture_positions(pictures: Sequence[tuple[int, Picture]]) -> tuple[np.ndarray, int]:
    """`pictures`: each with the index of its first token. Returns (positions_LC of the tokens up to the end of the last picture, the offset of all later tokens from their index)."""
    parts: list[np.ndarray] = []
    index = position = 0
    for first, picture in pictures:
        for (offset, length), grid in zip(picture.runs, picture.grids, strict=True):
            start = first + offset
            text = np.arange(start - index) + position
            parts.append(np.stack([text] * 3, 1))
            position += start - index
            index = start + length
            parts.append(grid_positions(grid) + position)
            position += max(grid)
    return np.concatenate(parts), position - index


def grid_positions(grid: tuple[int, int, int]) -> np.ndarray:
    """[N, C] of the rows of a grid, from 0: time, height, width."""
    counts_CTHW = np.indices(grid)
    return counts_CTHW.reshape(3, -1).T
