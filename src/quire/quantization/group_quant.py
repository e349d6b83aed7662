"""Group quantization: integer weights with a scale and a zero point per group of inputs, and their packing on disk.

Knows the integers and what they mean. Does not know names in checkpoints, or how to multiply.

    w[o, i] = scale[o, g] * (q[o, i] - zero[o, g]),    g: the group of input i

Shape suffixes: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.errors import ConfigError

LARGEST = 128  # inputs that share one scale of activations


@dataclass(frozen=True)
class Grouped:
    """A weight with contiguous groups of equal size; `order_I` gives the permutation, if the inputs needed one."""

    q_OI: Tensor  # uint8
    scale_OG: Tensor  # float32
    zero_OG: Tensor  # uint8
    order_I: Tensor | None = None  # int32: column -> input

    @property
    def group(self) -> int:
        return self.q_OI.shape[1] // self.scale_OG.shape[1]

    def dequantized(self) -> Tensor:
        """float32 [O, I], inputs in the original order."""
        whole = self.zero_OG.float().repeat_interleave(self.group, 1)
        w_OI = (self.q_OI.float() - whole) * self.scale_OG.repeat_interleave(self.group, 1)
        if self.order_I is None:
            return w_OI
        out = torch.empty_like(w_OI)
        out[:, self.order_I.long()] = w_OI
        return out

    def finer(self) -> Grouped:
        """The same weight in groups of at most 128, if halving the groups gets there."""
        parts = 1
        while self.group // parts > LARGEST and self.group % (2 * parts) == 0:
            parts *= 2
        if self.group // parts > LARGEST or parts == 1:
            return self
        return replace(
            self,
            scale_OG=self.scale_OG.repeat_interleave(parts, 1),
            zero_OG=self.zero_OG.repeat_interleave(parts, 1),
        )


def in_order(
    q_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, group_I: Tensor | None
) -> Grouped | None:
    """The weight with the inputs of each group contiguous; None if the groups differ in size.

    `group_I`: the group of each input; None: the groups are contiguous.

    Raises:
        ConfigError: `group_I` has a group out of range.
    """
    ins, groups = q_OI.shape[1], scale_OG.shape[1]
    scale_OG, zero_OG = scale_OG.float().contiguous(), zero_OG.contiguous()
    if group_I is None or int(group_I.min()) < 0:  # some writers fill an unused g_idx with -1
        return None if ins % groups else Grouped(q_OI, scale_OG, zero_OG)
    group_I = group_I.long()
    if int(group_I.max()) >= groups:
        raise ConfigError(f"g_idx names group {int(group_I.max())} of {groups}")
    if ins % groups or (torch.bincount(group_I, minlength=groups) != ins // groups).any():
        return None
    order_I = torch.argsort(group_I, stable=True)
    if torch.equal(order_I, torch.arange(ins, device=order_I.device)):
        return Grouped(q_OI, scale_OG, zero_OG)
    return Grouped(q_OI[:, order_I].contiguous(), scale_OG, zero_OG, order_I.int())


def scattered(q_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, group_I: Tensor) -> Tensor:
    """The dequantized weight [O, I], for groups of any size."""
    group_I = group_I.long()
    return (q_OI.float() - zero_OG.float()[:, group_I]) * scale_OG.float()[:, group_I]


def dense(words: Tensor, bits: int) -> Tensor:
    """int32 words [..., N] -> fields of `bits` bits, lowest first, uint8 [..., N * 32 // bits]; a field may begin in one word
    and end in the next."""
    if 8 % bits == 0:
        return fields(words, bits).flatten(-2)
    bytes_ = words.contiguous().view(torch.uint8)
    each = (bytes_[..., None] >> torch.arange(8, device=words.device).byte() & 1).flatten(-2)
    count = each.shape[-1] // bits
    parts = each[..., : count * bits].unflatten(-1, (count, bits)).unbind(-1)
    found = torch.zeros_like(parts[0])
    for place, part in enumerate(parts):
        found |= part << place
    return found


def fields(words: Tensor, bits: int) -> Tensor:
    """int32 words -> their fields of `bits` bits, lowest first, uint8, in a new last dimension.

    `bits` divides 8. It works on bytes to keep temporaries small.
    """
    bytes_ = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return bytes_
    parts = [(bytes_ >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)
