"""The blocks of GGUF files: which integers and scales they store, by type.

Knows the bits of each type, and the forms that the kernels multiply. Does not know weights.

    w = scale * (q - zero) - minimum,    scale = d * factor * unit,    minimum = dmin * least

Shape suffixes: O outputs, I inputs, G groups, B blocks, N bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.quantization.gguf_grids import numbers_of


class BlockCodes(NamedTuple):
    """Some rows of a weight. `q_OI`: uint8, or int8 of Q8_0 and of forms with codes. `d_OB`, `dmin_OB`: float16, or bfloat16 of
    MXFP4; `factor_OG`, `least_OG`: integers that they are multiplied by, if a block has several groups."""

    q_OI: Tensor
    d_OB: Tensor
    factor_OG: Tensor | None = None
    dmin_OB: Tensor | None = None
    least_OG: Tensor | None = None

    unit: float = 1.0

    def numbers(self, groups: int) -> tuple[Tensor, Tensor | None]:
        """scale_OG and minimum_OG, float32."""
        scale_OG = self.unit * self.d_OB.float().repeat_interleave(groups // self.d_OB.shape[1], 1)
        if self.factor_OG is not None:
            scale_OG = scale_OG * self.factor_OG
        if self.dmin_OB is None:
            return scale_OG, None
        dmin_OG = self.dmin_OB.float().repeat_interleave(groups // self.dmin_OB.shape[1], 1)
        return scale_OG, dmin_OG if self.least_OG is None else dmin_OG * self.least_OG


class BlockForm(NamedTuple):
    """A type of blocks.

    `number`: in kernels/block_forms.h; `stored`: bits of a weight in a record of the kernels; `block`, `size`: inputs and bytes
    of a block in the file; `group`: inputs of a group; `read`: blocks [O, B, size] -> codes; `codes`: the bytes that 4 stored
    bits stand for; `plain`: inputs of a block of the kernels, if they pack what `plain_rows` unpacks: `read` then gives numbers of codes.
    """

    number: int
    stored: int
    block: int
    size: int
    group: int
    zero: int
    read: Callable[[Tensor], BlockCodes]
    minima: bool = False
    codes: tuple[int, ...] = ()
    plain: int = 0

    @property
    def step(self) -> int:
        """Inputs that share a scale, of the weight and of x."""
        return self.plain or self.block

    @property
    def record(self) -> int:
        """Bytes of a block of 32 outputs in a panel."""
        groups = self.step // self.group
        header = 64 + (groups * 32 if groups > 1 else 0)
        each = header * (2 if self.minima else 1) + self.step * self.stored * 4
        return each * (self.block // self.step)

    def codes_of(self, rows_ON: Tensor) -> BlockCodes:
        found = self._numbers(rows_ON)
        if not self.plain:
            return found
        codes = torch.tensor(self.codes, dtype=torch.int8)
        return found._replace(q_OI=codes[found.q_OI.long()])

    def floats(self, rows_ON: Tensor) -> Tensor:
        """The weights that rows stand for, float32 [O, I]."""
        codes = self.codes_of(rows_ON)
        scale_OG, minimum_OG = codes.numbers(codes.q_OI.shape[1] // self.group)
        w_OGS = (codes.q_OI.float() - self.zero).unflatten(1, (-1, self.group)) * scale_OG[
            ..., None
        ]
        return (w_OGS if minimum_OG is None else w_OGS - minimum_OG[..., None]).flatten(1)

    def plain_rows(self, rows_ON: Tensor) -> Tensor:
        """Rows as kernels/pack_blocks.cpp takes them: of each block the scale, the factors, and a byte for each input."""
        found = self._numbers(rows_ON)
        blocks = found.d_OB.shape[1]
        parts = [found.d_OB, found.factor_OG, found.q_OI]
        parts_ON = [part.contiguous().view(torch.uint8) for part in parts if part is not None]
        return torch.cat([part.unflatten(1, (blocks, -1)) for part in parts_ON], 2).flatten(1)

    def _numbers(self, rows_ON: Tensor) -> BlockCodes:
        return self.read(rows_ON.view(len(rows_ON), -1, self.size))


def _halves(blocks_OBN: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high halves of bytes."""
    return blocks_OBN & 15, blocks_OBN >> 4


def _float16(blocks_OBN: Tensor, offset: int) -> Tensor:
    return blocks_OBN[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0]


def _q4_0(blocks_OBN: Tensor) -> BlockCodes:
    low, high = _halves(blocks_OBN[..., 2:])
    return BlockCodes(torch.cat([low, high], -1).flatten(1), _float16(blocks_OBN, 0))


def _q4_1(blocks_OBN: Tensor) -> BlockCodes:
    low, high = _halves(blocks_OBN[..., 4:])
    q = torch.cat([low, high], -1).flatten(1)
    return BlockCodes(q, _float16(blocks_OBN, 0), dmin_OB=-_float16(blocks_OBN, 2))


def _five_bits(blocks_OBN: Tensor, offset: int) -> Tensor:
    """32 bits of the fifth place, lowest first, then the halves of 16 bytes."""
    low, high = _halves(blocks_OBN[..., offset + 4 :])
    fifth = blocks_OBN[..., offset : offset + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (torch.cat([low, high], -1) | fifth.flatten(-2) << 4).flatten(1)


def _q5_0(blocks_OBN: Tensor) -> BlockCodes:
    return BlockCodes(_five_bits(blocks_OBN, 2), _float16(blocks_OBN, 0))


def _q5_1(blocks_OBN: Tensor) -> BlockCodes:
    minima = -_float16(blocks_OBN, 2)
    return BlockCodes(_five_bits(blocks_OBN, 4), _float16(blocks_OBN, 0), dmin_OB=minima)


def _q8_0(blocks_OBN: Tensor) -> BlockCodes:
    return BlockCodes(
        blocks_OBN[..., 2:].contiguous().view(torch.int8).flatten(1), _float16(blocks_OBN, 0)
    )


def _six_bits(packed_OBN: Tensor) -> tuple[Tensor, Tensor]:
    """8 factors of the scale and 8 of the minimum from 12 bytes: the last four have their upper bits in the first eight."""
    first, second, last = packed_OBN.split(4, -1)
    scales = torch.cat([first & 63, (last & 15) | (first >> 6 << 4)], -1)
    minima = torch.cat([second & 63, (last >> 4) | (second >> 6 << 4)], -1)
    return scales.flatten(1), minima.flatten(1)


def _low_four(packed_OBN: Tensor) -> Tensor:
    """Four times 32 bytes, the low halves of each before the high ones: [O, B, 8, 32]."""
    low, high = _halves(packed_OBN.unflatten(-1, (4, 32)))
    return torch.stack([low, high], 3).flatten(2, 3)


def _q4_k(blocks_OBN: Tensor) -> BlockCodes:
    scales, minima = _six_bits(blocks_OBN[..., 4:16])
    q = _low_four(blocks_OBN[..., 16:])
    return BlockCodes(
        q.flatten(1), _float16(blocks_OBN, 0), scales, _float16(blocks_OBN, 2), minima
    )


def _q5_k(blocks_OBN: Tensor) -> BlockCodes:
    scales, minima = _six_bits(blocks_OBN[..., 4:16])
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = blocks_OBN[..., None, 16:48] >> shifts & 1
    q = _low_four(blocks_OBN[..., 48:]) | fifth << 4
    return BlockCodes(
        q.flatten(1), _float16(blocks_OBN, 0), scales, _float16(blocks_OBN, 2), minima
    )


def _q6_k(blocks_OBN: Tensor) -> BlockCodes:
    low, high = _halves(blocks_OBN[..., :128].unflatten(-1, (2, 64)))
    four = torch.cat([low, high], -1).unflatten(-1, (4, 32))  # [O, B, 2, 4, 32]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    two = blocks_OBN[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    factors = blocks_OBN[..., 192:208].contiguous().view(torch.int8)
    return BlockCodes((four | two << 4).flatten(1), _float16(blocks_OBN, 208), factors.flatten(1))


def _pairs(packed_OBN: Tensor) -> Tensor:
    """64 bytes with two bits of four times 32 inputs each."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (packed_OBN.unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(2)


def _q2_k(blocks_OBN: Tensor) -> BlockCodes:
    scales, minima = _halves(blocks_OBN[..., :16])
    d, dmin = _float16(blocks_OBN, 80), _float16(blocks_OBN, 82)
    q_OI = _pairs(blocks_OBN[..., 16:80]).flatten(1)
    return BlockCodes(q_OI, d, scales.flatten(1), dmin, minima.flatten(1))


def _q3_k(blocks_OBN: Tensor) -> BlockCodes:
    third = blocks_OBN[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    q_OI = (_pairs(blocks_OBN[..., 32:96]) | third.flatten(2) << 2).flatten(1)
    low = torch.cat(_halves(blocks_OBN[..., 96:104]), -1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks_OBN[..., None, 104:108] >> shifts & 3).flatten(2)
    factors = (low | high << 4).view(torch.int8) - 32
    return BlockCodes(q_OI, _float16(blocks_OBN, 108), factors.flatten(1))


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
DOUBLE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _signed(*sizes: int) -> tuple[int, ...]:
    return (*sizes, *(-size for size in sizes))


def _looked_up(codes: tuple[int, ...], q_OX: Tensor) -> Tensor:
    return torch.tensor(codes, dtype=torch.int8)[q_OX.long()].flatten(1)


def _iq4_nl(blocks_OBN: Tensor) -> BlockCodes:
    q = torch.cat(_halves(blocks_OBN[..., 2:]), -1)
    return BlockCodes(_looked_up(IQ4, q), _float16(blocks_OBN, 0))


def _iq4_xs(blocks_OBN: Tensor) -> BlockCodes:
    low = torch.stack(_halves(blocks_OBN[..., 4:8]), -1).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = (blocks_OBN[..., 2:4, None] >> shifts & 3).flatten(2)
    q = torch.cat(_halves(blocks_OBN[..., 8:].unflatten(-1, (8, 16))), -1)
    factors = (low | high << 4).view(torch.int8) - 32
    return BlockCodes(_looked_up(IQ4, q.flatten(1)), _float16(blocks_OBN, 0), factors.flatten(1))


def _mxfp4(blocks_OBN: Tensor) -> BlockCodes:
    q = torch.cat(_halves(blocks_OBN[..., 1:]), -1)
    byte_OB = blocks_OBN[..., 0].to(torch.int16)
    bits_OB = torch.where(byte_OB < 2, 32 << byte_OB, (byte_OB - 1) << 7)  # of 2^(byte - 128)
    return BlockCodes(_looked_up(DOUBLE_E2M1, q), bits_OB.to(torch.int16).view(torch.bfloat16))


TERNARY = (-1, 0, 1, 2)


def _ternary(numbers: Tensor, blocks_OBN: Tensor, offset: int) -> BlockCodes:
    """The kernels have a scale for every 32 inputs."""
    each = numbers.shape[2] // 32
    d_OB = _float16(blocks_OBN, offset).repeat_interleave(each, 1)
    return BlockCodes(numbers.flatten(1), d_OB)


def _tq1_0(blocks_OBN: Tensor) -> BlockCodes:
    """Five weights, the last ones four, are digits of a fraction in base 3."""
    parts = []
    for part, powers in zip(blocks_OBN[..., :52].split((32, 16, 4), -1), (5, 5, 4), strict=True):
        moved = part[..., None, :] * 3 ** torch.arange(powers)[:, None]
        parts.append(((moved & 255) * 3 >> 8).byte().flatten(2))
    return _ternary(torch.cat(parts, 2), blocks_OBN, 52)


def _tq2_0(blocks_OBN: Tensor) -> BlockCodes:
    return _ternary(_pairs(blocks_OBN[..., :64]).flatten(2), blocks_OBN, 64)


def _q1_0(blocks_OBN: Tensor) -> BlockCodes:
    """One bit: plus or minus the scale."""
    bits = blocks_OBN[..., 2:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _ternary((bits << 1).flatten(2), blocks_OBN, 0)


Factors = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Blocks -> d_OB and the whole factors [O, B, 8 or 16]."""


def _of_grids(
    factors: Factors, kind: str, codes: tuple[int, ...], unit: float, blocks_OBN: Tensor
) -> BlockCodes:
    """Types whose weights are rows of tables."""
    d_OB, factor_OBG = factors(blocks_OBN)
    groups = 256 // (16 if len(codes) == 6 else 32)
    factor_OG = factor_OBG.repeat_interleave(groups // factor_OBG.shape[2], 2).flatten(1)
    numbers_OI = numbers_of(kind, codes, blocks_OBN)
    return BlockCodes(numbers_OI, d_OB, factor_OG.to(torch.int8), unit=unit)


def _odd(q_OBX: Tensor) -> Tensor:
    return 2 * q_OBX.int() + 1


def _words(bytes_OBN: Tensor) -> Tensor:
    """Four bytes each as one number."""
    return bytes_OBN.contiguous().view(torch.int32)


def _nibbles_in_turn(bytes_OBN: Tensor) -> Tensor:
    return torch.stack(_halves(bytes_OBN), -1).flatten(2)


def _iq2_xxs(b: Tensor) -> tuple[Tensor, Tensor]:
    return _float16(b, 0), _odd(_words(b[..., 2:])[..., 1::2] >> 28 & 15)


def _iq3_xxs(b: Tensor) -> tuple[Tensor, Tensor]:
    return _float16(b, 0), _odd(_words(b[..., 66:]) >> 28 & 15)


def _last_nibbles(b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return _float16(b, 0), _odd(_nibbles_in_turn(b[..., -count:]))


def _iq1_s(b: Tensor) -> tuple[Tensor, Tensor]:
    return _float16(b, 0), _odd(b[..., 35::2] >> 4 & 7)


def _iq1_m(b: Tensor) -> tuple[Tensor, Tensor]:
    words = b[..., 48:].contiguous().view(torch.int16).int()
    places = 4 * torch.arange(4, dtype=torch.int32)
    d = ((words >> 12 & 15) << places).sum(2)
    shifts = torch.arange(0, 12, 3, dtype=torch.int32)
    return d.to(torch.int16).view(torch.float16), _odd((words[..., None] >> shifts & 7).flatten(2))


def _grid(
    number: int, kind: str, size: int, factors: Factors, codes: tuple[int, ...], unit: float
) -> BlockForm:
    read = partial(_of_grids, factors, kind, codes, unit)
    group = 16 if len(codes) == 6 else 32
    return BlockForm(number, 4, 256, size, group, 0, read, codes=codes, plain=256)


IQ2, IQ1 = _signed(8, 25, 43), _signed(1, 7, 9)

FORMS = {
    "Q4_0": BlockForm(0, 4, 32, 18, 32, 8, _q4_0),
    "Q8_0": BlockForm(1, 8, 32, 34, 32, 0, _q8_0),
    "Q4_K": BlockForm(2, 4, 256, 144, 32, 0, _q4_k, minima=True),
    "Q5_K": BlockForm(3, 5, 256, 176, 32, 0, _q5_k, minima=True),
    "Q6_K": BlockForm(4, 6, 256, 210, 16, 32, _q6_k),
    "Q4_1": BlockForm(5, 4, 32, 20, 32, 0, _q4_1, minima=True),
    "Q5_0": BlockForm(6, 5, 32, 22, 32, 16, _q5_0),
    "Q5_1": BlockForm(7, 5, 32, 24, 32, 0, _q5_1, minima=True),
    "Q2_K": BlockForm(8, 4, 256, 84, 16, 0, _q2_k, minima=True),
    "Q3_K": BlockForm(9, 4, 256, 110, 16, 4, _q3_k),
    "IQ4_NL": BlockForm(10, 4, 32, 18, 32, 0, _iq4_nl, codes=IQ4),
    "IQ4_XS": BlockForm(11, 4, 256, 136, 32, 0, _iq4_xs, codes=IQ4),
    "MXFP4": BlockForm(12, 4, 32, 17, 32, 0, _mxfp4, codes=DOUBLE_E2M1),
    "IQ3_XXS": _grid(13, "IQ3_XXS", 98, _iq3_xxs, _signed(4, 12, 20, 28, 36, 44, 52, 62), 0.25),
    "IQ3_S": _grid(
        14, "IQ3_S", 110, partial(_last_nibbles, count=4), _signed(*range(1, 16, 2)), 1.0
    ),
    "IQ2_XXS": _grid(15, "IQ2_XXS", 66, _iq2_xxs, IQ2, 0.125),
    "IQ2_XS": _grid(15, "IQ2_XS", 74, partial(_last_nibbles, count=8), IQ2, 0.125),
    "IQ2_S": _grid(15, "IQ2_S", 82, partial(_last_nibbles, count=8), IQ2, 0.125),
    "IQ1_S": _grid(16, "IQ1_S", 50, _iq1_s, IQ1, 0.125),
    "IQ1_M": _grid(16, "IQ1_M", 56, _iq1_m, IQ1, 0.125),
    "TQ1_0": BlockForm(17, 4, 256, 54, 32, 0, _tq1_0, codes=TERNARY, plain=32),
    "TQ2_0": BlockForm(17, 4, 256, 66, 32, 0, _tq2_0, codes=TERNARY, plain=32),
    "Q1_0": BlockForm(17, 4, 128, 18, 32, 0, _q1_0, codes=TERNARY, plain=32),
}
"""Type of a tensor -> the form that the kernels multiply."""
