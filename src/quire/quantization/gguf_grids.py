"""The types IQ1 to IQ3 of GGUF files, whose weights are rows of large tables: which row, and which signs.

Knows the bits of these types; the `gguf` package has their tables. Does not know scales (`gguf_forms.py`).

Shape suffixes: O outputs, I inputs, B blocks of 256 inputs, N bytes of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

Rows = tuple[Tensor, Tensor | None]
"""Numbers of rows of a table [O, B, 32 or 64], and 8 signs each as bits [O, B, 32]; None: the rows have signs."""


def numbers_of(kind: str, codes: tuple[int, ...], blocks_OBN: Tensor) -> Tensor:
    """uint8 [O, I]: the number of each weight among the codes, of which the second half are the negative ones."""
    rows, signs = READ[kind](blocks_OBN)
    found = _table(kind, codes)[rows.long()].view(torch.int64)
    if signs is not None:
        found = found + _sign_table(len(codes) // 2)[signs.long()]
    return found.view(torch.uint8).flatten(1)


@functools.cache
def _table(kind: str, codes: tuple[int, ...]) -> Tensor:
    """The numbers of the codes in each row, as the bytes of one int64, or of an int32 for rows of 4."""
    import gguf

    quant = getattr(gguf.quants, kind)
    quant.init_grid()
    values = torch.from_numpy(quant.grid.reshape(quant.grid_shape)).int()
    if kind.startswith("IQ1"):  # moved up, then moved down, by an eighth
        values = torch.cat([8 * values + 1, 8 * values - 1])
    numbers = (values[..., None] == torch.tensor(codes)).byte().argmax(-1).byte()
    return numbers.view(torch.int64 if numbers.shape[1] == 8 else torch.int32)[:, 0]


@functools.cache
def _sign_table(distance: int) -> Tensor:
    """By 8 bits: what they add to 8 numbers."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (bits * distance).byte().view(torch.int64)[:, 0]


@functools.cache
def _eight_signs() -> Tensor:
    """By 7 bits: 8 signs, whose number is even."""
    import gguf

    return torch.tensor(list(gguf.quants.IQ2_XXS.ksigns), dtype=torch.uint8)


def _parts(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """Fields of each number, side by side."""
    places = torch.tensor(list(shifts), dtype=packed.dtype)
    return (packed[..., None] >> places & mask).flatten(2)


def _words(bytes_OBN: Tensor) -> Tensor:
    return bytes_OBN.contiguous().view(torch.int32)


def _shorts(bytes_OBN: Tensor) -> Tensor:
    return bytes_OBN.contiguous().view(torch.int16).int() & 0xFFFF


def _sevens(words: Tensor) -> Tensor:
    return _eight_signs()[_parts(words, range(0, 28, 7), 127).long()]


def _iq2_xxs(b: Tensor) -> Rows:
    rows, words = b[..., 2:].unflatten(-1, (8, 2, 4)).unbind(3)
    return rows.flatten(2), _sevens(_words(words.flatten(2)))


def _iq2_xs(b: Tensor) -> Rows:
    shorts = _shorts(b[..., 2:66])
    return shorts & 511, _eight_signs()[(shorts >> 9).long()]


def _iq2_s(b: Tensor) -> Rows:
    return b[..., 2:34].int() | _parts(b[..., 66:74].int(), range(0, 8, 2), 3) << 8, b[..., 34:66]


def _iq3_xxs(b: Tensor) -> Rows:
    return b[..., 2:66], _sevens(_words(b[..., 66:]))


def _iq3_s(b: Tensor) -> Rows:
    return b[..., 2:66].int() | _parts(b[..., 66:74].int(), range(8), 1) << 8, b[..., 74:106]


def _iq1_s(b: Tensor) -> Rows:
    shorts = _shorts(b[..., 34:])
    rows = b[..., 2:34].int() | _parts(shorts, range(0, 12, 3), 7) << 8
    return rows | (shorts >> 15).repeat_interleave(4, 2) << 11, None


def _iq1_m(b: Tensor) -> Rows:
    upper = _parts(b[..., 32:48].int(), range(0, 8, 4), 15)
    return b[..., :32].int() | upper << 8, None  # the fourth bit moves down


READ: dict[str, Callable[[Tensor], Rows]] = {
    "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}  # fmt: skip
