"""LoRA: adds each token's adapter to a layer's outputs. The definition; kernels run where `dispatch` has them.

Knows the factors of a weight's adapters, packed for the kernels. Does not know layers, names or files.

    y = (y + B (s * A x)) * gain + offset        gain and offset: DoRA and trained biases; without them y + B (s * A x)

A x is summed in float32, in sixteen lanes over the inputs, then over the lanes; B (...) in float32 over the rank, ascending; the
result is rounded once. So a token's bits depend on its input and its adapter alone.

Shape suffixes: T tokens, I inputs, O outputs, R rank (of all parts), P panels of LANES outputs, S steps of LANES inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.cpu.structs import CLora, CLoraPart
from quire.ops.dispatch import op

LANES = 16
FIELDS, PART_FIELDS, MAX_PARTS = 7, 5, 8
"""Of a row of `LoraTable.device_rows`: addresses of a, b, gain, offset and scales, the rank, the number of parts; then of each
part start, outs, first, rank, at."""


class LoraPart(NamedTuple):
    """Outputs [start, start + outs) of a weight, whose A is rows [first, first + rank) of the factors' A, and whose B begins
    at element `offset` of their B."""

    start: int
    outs: int
    first: int
    rank: int
    offset: int
    scale: float


class NewPart(NamedTuple):
    """A part before it is packed. a_RI, b_OR: None if only gain and offset change."""

    start: int
    outs: int
    scale: float
    a_RI: Tensor | None
    b_OR: Tensor | None


class LoraFactors:
    """One adapter's factors of one weight.

    Args:
        parts: of the weight's outputs; their A's are multiplied at once.
        gain_O, offset_O: of all outputs of the weight, float32.
        dtype: of A and B.

    Attributes:
        a_RI: inputs are padded to whole LANES.
        b: of each part [P, R, LANES], one after the other.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        parts: Sequence[NewPart],
        dtype: torch.dtype,
        gain_O: Tensor | None = None,
        offset_O: Tensor | None = None,
    ):
        self.num_in, self.num_out = num_in, num_out
        made, a, b, first, offset = [], [], [], 0, 0
        for part in parts:
            rank = 0 if part.a_RI is None else len(part.a_RI)
            made.append(LoraPart(part.start, part.outs, first, rank, offset, part.scale))
            if part.a_RI is not None and part.b_OR is not None:
                a.append(F.pad(part.a_RI.to(dtype), (0, -num_in % LANES)))
                b.append(_panels(part.b_OR.to(dtype)))
                first, offset = first + rank, offset + b[-1].numel()
        self.parts, self.rank = tuple(made), first
        none = torch.zeros(0, dtype=dtype)
        self.a_RI = torch.cat(a) if a else none.view(0, num_in + -num_in % LANES)
        self.b = torch.cat(b) if b else none
        scales = [part.scale for part in made for _ in range(part.rank)]
        self.scales_R = torch.tensor(scales, dtype=torch.float32)
        self.gain_O, self.offset_O = _padded(gain_O), _padded(offset_O)
        self.struct: CLora | None = self._struct()

    def move(self, device: torch.device) -> None:
        """Move the tensors to an accelerator."""
        self.a_RI, self.b, self.scales_R = (
            each.to(device) for each in (self.a_RI, self.b, self.scales_R)
        )
        if self.gain_O is not None:
            self.gain_O = self.gain_O.to(device)
        if self.offset_O is not None:
            self.offset_O = self.offset_O.to(device)
        self.struct = None

    def device_row(self) -> list[int]:
        """For `LoraTable.device_rows`."""
        pointers = (self.a_RI, self.b, self.gain_O, self.offset_O, self.scales_R)
        row = [0 if each is None else each.data_ptr() for each in pointers]
        row += [self.rank, len(self.parts)]
        for part in self.parts:
            row += [part.start, part.outs, part.first, part.rank, part.offset]
        return row + [0] * (FIELDS + MAX_PARTS * PART_FIELDS - len(row))

    def tensors(self) -> list[Tensor]:
        found = (self.a_RI, self.b, self.gain_O, self.offset_O, self.scales_R)
        return [each for each in found if each is not None]

    def _struct(self) -> CLora | None:
        """For the CPU kernels; None: they do not multiply factors of this dtype."""
        if self.b.dtype not in (torch.bfloat16, torch.float32):
            return None
        self._parts = (CLoraPart * len(self.parts))(*(CLoraPart(*each) for each in self.parts))
        gain, offset = (
            None if each is None else each.data_ptr() for each in (self.gain_O, self.offset_O)
        )
        return CLora(
            self.a_RI.data_ptr(), self.b.data_ptr(), gain, offset, ctypes.addressof(self._parts), len(self.parts),
            self.rank, self.num_in, self.b.dtype == torch.bfloat16,
        )  # fmt: skip


def _panels(b_OR: Tensor) -> Tensor:
    """[P, R, LANES], flat."""
    outs, rank = b_OR.shape
    padded_OR = F.pad(b_OR, (0, 0, 0, -outs % LANES))
    return padded_OR.view(-1, LANES, rank).transpose(1, 2).reshape(-1)


def _padded(values_O: Tensor | None) -> Tensor | None:
    return None if values_O is None else F.pad(values_O.float(), (0, LANES)).contiguous()


class LoraTable:
    """The factors of one weight, by the number of the adapter.

    Args:
        device: of an accelerator, if the weight is there: its kernels read `device_rows`.
        dtype, width: then of all factors, and their largest rank.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        width: int = 0,
    ):
        self.device, self.dtype, self.width = device, dtype, width
        self.device_rows: Tensor | None = None  # this tensor never moves
        if device is not None:
            size = FIELDS + MAX_PARTS * PART_FIELDS
            self.device_rows = torch.zeros(capacity, size, dtype=torch.int64, device=device)
        self.factors: list[LoraFactors | None] = [None] * capacity
        # Of the structs for the CPU kernels; this array never moves.
        self.addresses = (ctypes.c_void_p * capacity)()
        self.address = ctypes.addressof(self.addresses)
        self.is_native = True
        """Whether the CPU kernels multiply all of them."""

    def set(self, number: int, factors: LoraFactors | None) -> None:
        """Replace the factors of an adapter, after the steps that are queued on the device.

        Raises:
            ValueError: their rank is above `width`.
        """
        if self.device_rows is not None:
            if factors is not None and (
                factors.rank > self.width or len(factors.parts) > MAX_PARTS
            ):
                raise ValueError(f"an adapter of rank {factors.rank} in a table for {self.width}")
            row = [0] * self.device_rows.shape[1] if factors is None else factors.device_row()
            self.device_rows[number] = torch.tensor(row)
        self.factors[number] = factors
        struct = None if factors is None else factors.struct
        self.addresses[number] = None if struct is None else ctypes.addressof(struct)
        self.is_native = all(each is None or each.struct is not None for each in self.factors)


@op
def lora(x_TI: Tensor, y_TO: Tensor, numbers_T: Tensor, table: LoraTable) -> Tensor:
    """y_TO, changed in place. numbers_T: each token's adapter; -1: none."""
    for number in numbers_T.unique().tolist():
        factors = None if number < 0 else table.factors[number]
        if factors is not None:
            rows = (numbers_T == number).nonzero()[:, 0]
            h_TR = shrink(x_TI[rows], factors)
            y_TO[rows] = expand(h_TR, y_TO[rows], factors)
    return y_TO


def lora_lookup(ids_T: Tensor, y_TO: Tensor, numbers_T: Tensor, table: LoraTable) -> Tensor:
    """`lora` for a table: the column of A that belongs to the token's id, in place of A x."""
    for number in numbers_T.unique().tolist():
        factors = None if number < 0 else table.factors[number]
        if factors is not None:
            rows = (numbers_T == number).nonzero()[:, 0]
            h_TR = factors.a_RI[:, ids_T[rows]].T.float()
            y_TO[rows] = expand(h_TR, y_TO[rows], factors)
    return y_TO


def shrink(x_TI: Tensor, factors: LoraFactors) -> Tensor:
    """A x, float32: h_TR."""
    x_TI = F.pad(x_TI, (0, -x_TI.shape[1] % LANES)).double()
    a_RI = factors.a_RI.double()
    total = torch.zeros(len(x_TI), len(a_RI), LANES)
    for x, a in zip(x_TI.split(LANES, 1), a_RI.split(LANES, 1), strict=True):
        total = (x[:, None] * a[None] + total.double()).float()
    total = total[..., :8] + total[..., 8:]
    total = total[..., :4] + total[..., 4:]
    return (total[..., 0] + total[..., 2]) + (total[..., 1] + total[..., 3])


def expand(h_TR: Tensor, y_TO: Tensor, factors: LoraFactors) -> Tensor:
    """y with the products of B and the scaled h, times gain, plus offset."""
    y_TO = y_TO.clone()
    for start, outs, first, rank, offset, scale in factors.parts:
        panels = -(-outs // LANES)
        b_PRL = factors.b[offset : offset + panels * rank * LANES].view(panels, rank, LANES)
        scaled_TR = (h_TR[:, first : first + rank] * scale).double()
        total_TO = torch.zeros(len(y_TO), outs)
        for r in range(rank):
            b_O = b_PRL[:, r].reshape(-1)[:outs].double()
            total_TO = (scaled_TR[:, r : r + 1] * b_O + total_TO.double()).float()
        here = slice(start, start + outs)
        value_TO = y_TO[:, here].float() + total_TO
        if factors.gain_O is not None:
            value_TO = value_TO * factors.gain_O[here]
        if factors.offset_O is not None:
            value_TO = value_TO + factors.offset_O[here]
        y_TO[:, here] = value_TO.to(y_TO.dtype)
    return y_TO
