"""What an engine looks like from inside, for the page at `/`: its blocks and its requests.

Knows the scheduler and its pool. Tells no tokens and no texts. Costs nothing until somebody asks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from quire.engine.core import EngineCore
from quire.kvcache.pool import NULL_BLOCK, BlockPool
from quire.scheduler.request import Request

CELLS = 4096  # more blocks than these are told by several a cell
MOST_WAITING = 100
FREE, CACHED, SHARED = -1, -2, -3


def view(core: EngineCore) -> dict[str, Any]:
    """Counters, a cell for each block (or for several), and requests, as builtins.

    A cell is the row of the request that holds the block, or FREE, CACHED (free, and found again if somebody asks
    the same), SHARED (held by several requests).
    """
    scheduler = core.scheduler
    cells, blocks_a_cell = block_map(scheduler.kv.pool, scheduler.running)
    waiting = [request for request, _ in zip(scheduler.waiting, range(MOST_WAITING), strict=False)]
    return {
        "stats": dict(msgspec.structs.asdict(core.stats())),
        "cells": cells,
        "blocks_a_cell": blocks_a_cell,
        "requests": [about(one) for one in [*scheduler.running, *waiting]],
        "limits": dataclasses.asdict(scheduler.limits),
    }


def block_map(pool: BlockPool, running: list[Request]) -> tuple[list[int], int]:
    """A cell shows what most needs to be seen of its blocks: held, then cached, then free."""
    cells = [FREE] * pool.num_blocks
    for block in pool.hash_of:
        cells[block] = CACHED
    for request in running:
        for column in request.blocks:
            for block in column:
                if block != NULL_BLOCK:
                    cells[block] = request.row if pool.refs[block] == 1 else SHARED
    cells = cells[1:]
    size = -(-len(cells) // CELLS)
    if size <= 1:
        return cells, 1
    order = {FREE: 0, CACHED: 1, SHARED: 2}
    parts = (cells[start : start + size] for start in range(0, len(cells), size))
    return [max(part, key=lambda cell: order.get(cell, 3)) for part in parts], size


def about(request: Request) -> dict[str, Any]:
    """How far a request is."""
    if request.row < 0:
        state = "preempted" if request.preemptions else "waiting"
    else:
        state = "prefill" if request.computed < request.num_prompt else "decode"
    return {
        "id": request.id,
        "row": request.row,
        "state": state,
        "prompt": request.num_prompt,
        "computed": min(request.computed, request.length),
        "cached": request.hit,
        "output": len(request.tokens) - request.num_prompt,
        "limit": request.limit - request.num_prompt,
        "preemptions": request.preemptions,
    }
