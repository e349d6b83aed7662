"""Weights whose codes of 4 bits stand for the values of a table: MXFP4, and bitsandbytes' NF4 and FP4.

Knows the tables, and how to find the codes of floats. Does not know how a weight multiplies (int4.py) or how files store it.

    w[o, i] = scale[o, g] * values[code[o, i]],    g: the group of input i

The kernels multiply by integers: `steps` times the values, rounded. That is exact for MXFP4, and for FP4 but for its smallest
value; NF4's values move by up to 0.004. Sources: OCP Microscaling Formats 1.0; QLoRA (arXiv 2305.14314), appendix E;
bitsandbytes.

Shape suffixes: I inputs, O outputs, G groups, S inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.layers.checkpoint_tensor import CheckpointTensor
from quire.layers.prepared_weight import PreparedWeight
from quire.layers.weights import CheckpointFormat, WeightRef
from quire.logging import get_logger
from quire.ops.cpu.bindings import Kernels
from quire.quantization.block_floats import E2M1
from quire.quantization.group_quant import Grouped
from quire.quantization.int4 import MAX_FLOATS, STEP, Int4Weight
from quire.quantization.int8 import Int8Weight

log = get_logger(__name__)


@dataclass(frozen=True)
class Codebook:
    """A table of 16 values.

    `steps`: integers in a value of 1. `groups`: usual sizes of a group. `power`: scales are powers of two, and the
    largest value is 4 or more; else the largest weight of a group is its scale.
    """

    values: tuple[float, ...]
    steps: int
    groups: tuple[int, ...]
    power: bool = False

    @cached_property
    def integers(self) -> Tensor:
        """uint8, `zero` for a value of 0."""
        return (torch.tensor(self.values) * self.steps).round_().add_(self.zero).byte()

    @cached_property
    def zero(self) -> int:
        return round(max(self.values) * self.steps)

    def prepared(self, found: Grouped, gated: bool, kernels: Kernels | None) -> Int4Weight:
        return Int4Weight(found, gated, kernels, self.integers)

    def means(self, found: Grouped) -> Tensor:
        """The floats [O, I] that the codes stand for."""
        scale_OI = (found.scale_OG * self.steps).repeat_interleave(found.group, 1)
        return torch.tensor(self.values)[found.q_OI.int()] * scale_OI

    def grouped(self, weight_OI: Tensor, group: int) -> Grouped:
        """The nearest codes."""
        rows = max(1, MAX_FLOATS // weight_OI.shape[1])
        parts = [self._codes(part_OI.float(), group) for part_OI in weight_OI.split(rows)]
        code_OI, scale_OG = (torch.cat(each) for each in zip(*parts, strict=True))
        zero_OG = torch.full_like(scale_OG, self.zero, dtype=torch.uint8)
        return Grouped(code_OI, scale_OG / self.steps, zero_OG)

    def _codes(self, weight_OI: Tensor, group: int) -> tuple[Tensor, Tensor]:
        w_OGS = weight_OI.unflatten(1, (-1, group))
        scale_OG = w_OGS.abs().amax(2)
        if self.power:
            scale_OG = torch.ldexp(torch.ones_like(scale_OG), scale_OG.frexp().exponent - 3)
        scale_OG[scale_OG == 0] = 1
        values, order = torch.tensor(self.values).sort()
        place_OGS = torch.bucketize(w_OGS / scale_OG[..., None], (values[1:] + values[:-1]) / 2)
        return order.byte()[place_OGS].flatten(1), scale_OG

    def of(self, weight_OI: Tensor, gated: bool, kernels: Kernels | None) -> PreparedWeight:
        """Quantize a weight of any float dtype; int8 if no group divides the inputs."""
        for group in self.groups:
            if weight_OI.shape[1] % group == 0:
                return self.prepared(self.grouped(weight_OI, group), gated, kernels)
        return Int8Weight.of(weight_OI, gated, kernels)


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
_FP4 = tuple(n / 192 for n in (0, 1, 128, 192, 64, 96, 32, 48))

BOOKS = {
    "mxfp4": Codebook(tuple(E2M1.tolist()), 2, (32,), power=True),
    "nf4": Codebook(_NF4, 112, (64, 128)),
    "fp4": Codebook((*_FP4, *(-value for value in _FP4)), 96, (64, 128)),
}

READ = {"mxfp4": ("mxfp4",), "mxfp4-experts": ("mxfp4",), "bnb-4bit": ("nf4", "fp4")}
"""Reader of a checkpoint (dequantize_on_load.py) -> the tables of its weights."""


class CodedFormat(CheckpointFormat):
    """Floats that a reader decoded from codes of 4 bits: the weight keeps the codes.

    Args:
        reader: its name.
        kernels: multiply.
    """

    gives_floats = True

    def __init__(self, reader: str, kernels: Kernels):
        self.books = [BOOKS[name] for name in READ[reader]]
        self.kernels = kernels

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, CheckpointTensor]:
        whole = dtype if self.books[0].power else torch.float32  # bfloat16 has e2m1 exactly
        return {"weight": CheckpointTensor((num_out, num_in), whole)}

    def convert(self, ref: WeightRef) -> PreparedWeight | Tensor:
        weight_OI = ref.tensor("weight")
        if Int4Weight.fits(ref.num_out, ref.num_in, ref.gated, STEP):
            for book in self.books:
                for group in book.groups:
                    if ref.num_in % group == 0:
                        found = book.grouped(weight_OI, group)
                        if torch.allclose(book.means(found), weight_OI.float(), 1e-6, 0):
                            return book.prepared(found, ref.gated, self.kernels)
        log.debug("no table has these %s: they stay %s", list(weight_OI.shape), ref.dtype)
        return weight_OI
