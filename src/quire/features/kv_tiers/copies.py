"""What a plan tells the hook of kept blocks, and what each rank tells the engine at the start. No torch here."""

from __future__ import annotations

from msgspec import Struct

NAME = "kv_tiers"
SlotCopy = tuple[int, int, int]
"""A slot of the staging memory, a KV group, a block. The groups after the last KV group are the parts of a state (`states.py`): then the
last number is the place of a checkpoint."""


class BlockCopies(Struct, array_like=True, omit_defaults=True):
    """Copies that a rank runs before the step: first from blocks to slots, then from slots to blocks."""

    saves: list[SlotCopy] = []
    loads: list[SlotCopy] = []
    filled: list[tuple[int, int]] = []
    """The places of checkpoints that the loads write parts of, and the last plan before that did so; 0: none has."""


def part_bytes(state_bytes: int, num_parts: int) -> list[int]:
    """How many of these bytes are in each part of a state."""
    each = -(-state_bytes // num_parts)
    return [max(min(state_bytes - part * each, each), 0) for part in range(num_parts)]


class RankBlocks(Struct):
    """What one rank has of each block.

    Attributes:
        id: of this rank's hook.
        group_bytes: by KV group.
        state_bytes: of a recurrent state, of the layers of this rank.
        states: the shapes and formats of these states.
        backends: of attention, by layer.
        exact: tokens that were generated have the same keys and values as in a prompt, bit for bit.
        refusal: why its blocks cannot be kept; "": they can.
    """

    id: str
    group_bytes: list[int]
    state_bytes: int
    states: str
    backends: list[str]
    exact: bool
    refusal: str = ""
