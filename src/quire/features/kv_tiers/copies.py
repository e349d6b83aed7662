"""What a plan tells the hook of kept blocks, and what each rank tells the engine at the start. No torch here."""

from __future__ import annotations

from msgspec import Struct

NAME = "kv_tiers"
SlotCopy = tuple[int, int, int]
"""A slot of the staging memory, a KV group, a block."""


class BlockCopies(Struct, array_like=True, omit_defaults=True):
    """Copies that a rank runs before the step: first from blocks to slots, then from slots to blocks."""

    saves: list[SlotCopy] = []
    loads: list[SlotCopy] = []


class RankBlocks(Struct):
    """What one rank has of each block.

    Attributes:
        id: of this rank's hook.
        group_bytes: by KV group.
        backends: of attention, by layer.
        exact: tokens that were generated have the same keys and values as in a prompt, bit for bit.
        refusal: why its blocks cannot be kept; "": they can.
    """

    id: str
    group_bytes: list[int]
    backends: list[str]
    exact: bool
    refusal: str = ""
