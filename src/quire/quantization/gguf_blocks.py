"""GGUF's blocks of 4, 5, 6 and 8 bits on the CPU: the stored integers, repacked; activations dynamically int8.

Knows one weight, and the bits of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K. Batch-invariant, as int4: integers sum exactly within a group,
groups are added in order.

    y = bias + sum over groups of  scale_x * (scale_w * (sum (x_q * q) - zero * sum x_q) - minimum_w * sum x_q)
    x_q = round(127 x / max |x of 32 inputs|),    w = scale_w * (q - zero) - minimum_w, exactly the file's

Shape suffixes: T tokens, I inputs, O outputs, G groups, B blocks, N bytes of a row, P panels of 32 outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.layers.embedding import Embedding, TableRef
from quire.layers.weight_slots import named_layers
from quire.layers.weights import (
    PANEL,
    CheckpointFormat,
    PreparedWeight,
    StoredTensor,
    WeightRef,
    addresses,
    weights_of,
)
from quire.ops.cpu.bindings import Kernels
from quire.platforms.memory import empty_in_huge_pages
from quire.quantization.checkpoint_format import kernels_for
from quire.quantization.int8 import quantize

EXPERT = re.compile(r"\.\d+\.(?=[^.]+\.weight$)")
STEP = 32  # inputs of x that share a scale
AT_ONCE = 1 << 20  # weights that are unpacked at a time


class BlockCodes(NamedTuple):
    """Some rows of a weight. `q_OI`: uint8, or int8 of Q8_0. `d_OB`, `dmin_OB`: float16; `factor_OG`, `least_OG`: integers
    that they are multiplied by, if a block has several groups."""

    q_OI: Tensor
    d_OB: Tensor
    factor_OG: Tensor | None = None
    dmin_OB: Tensor | None = None
    least_OG: Tensor | None = None

    def numbers(self, groups: int) -> tuple[Tensor, Tensor | None]:
        """scale_OG and minimum_OG, float32."""
        scale_OG = self.d_OB.float().repeat_interleave(groups // self.d_OB.shape[1], 1)
        if self.factor_OG is not None:
            scale_OG = scale_OG * self.factor_OG
        if self.dmin_OB is None:
            return scale_OG, None
        dmin_OG = self.dmin_OB.float().repeat_interleave(groups // self.dmin_OB.shape[1], 1)
        return scale_OG, dmin_OG if self.least_OG is None else dmin_OG * self.least_OG


class BlockForm(NamedTuple):
    """A type of blocks. `number`: in kernels/gemm_blocks.cpp; `block`, `size`: inputs and bytes of a block; `group`: inputs of a
    group; `read`: blocks [..., size] -> codes."""

    number: int
    bits: int
    block: int
    size: int
    group: int
    zero: int
    read: Callable[[Tensor], BlockCodes]

    @property
    def record(self) -> int:
        """Bytes of a block of 32 outputs in a panel."""
        groups = self.block // self.group
        header = 64 + (groups * 32 if groups > 1 else 0)
        return header * (2 if self.number in WITH_MINIMA else 1) + self.block * self.bits * 4

    def codes(self, rows_ON: Tensor) -> BlockCodes:
        return self.read(rows_ON.view(len(rows_ON), -1, self.size))


WITH_MINIMA = (2, 3, 5, 7)
"""Numbers of forms that store minima."""


def _halves(blocks_OBN: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high halves of bytes."""
    return blocks_OBN & 15, blocks_OBN >> 4


def _float16(blocks_OBN: Tensor, at: int) -> Tensor:
    return blocks_OBN[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _q4_0(blocks_OBN: Tensor) -> BlockCodes:
    low, high = _halves(blocks_OBN[..., 2:])
    return BlockCodes(torch.cat([low, high], -1).flatten(1), _float16(blocks_OBN, 0))


def _q4_1(blocks_OBN: Tensor) -> BlockCodes:
    low, high = _halves(blocks_OBN[..., 4:])
    q = torch.cat([low, high], -1).flatten(1)
    return BlockCodes(q, _float16(blocks_OBN, 0), dmin_OB=-_float16(blocks_OBN, 2))


def _five_bits(blocks_OBN: Tensor, at: int) -> Tensor:
    """32 bits of the fifth place, lowest first, then the halves of 16 bytes."""
    low, high = _halves(blocks_OBN[..., at + 4 :])
    fifth = blocks_OBN[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
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


FORMS = {
    "Q4_0": BlockForm(0, 4, 32, 18, 32, 8, _q4_0),
    "Q8_0": BlockForm(1, 8, 32, 34, 32, 0, _q8_0),
    "Q4_K": BlockForm(2, 4, 256, 144, 32, 0, _q4_k),
    "Q5_K": BlockForm(3, 5, 256, 176, 32, 0, _q5_k),
    "Q6_K": BlockForm(4, 6, 256, 210, 16, 32, _q6_k),
    "Q4_1": BlockForm(5, 4, 32, 20, 32, 0, _q4_1),
    "Q5_0": BlockForm(6, 5, 32, 22, 32, 16, _q5_0),
    "Q5_1": BlockForm(7, 5, 32, 24, 32, 0, _q5_1),
}
"""Type of a tensor -> the form that the kernels multiply."""


class BlockRows(NamedTuple):
    """Rows of a weight as the file stores them, [O, N], all of one type."""

    kind: str
    rows_ON: Tensor

    @property
    def form(self) -> BlockForm:
        return FORMS[self.kind]

    def split(self) -> tuple[BlockRows, BlockRows]:
        """The halves of a gated weight."""
        first, second = self.rows_ON.chunk(2)
        return BlockRows(self.kind, first), BlockRows(self.kind, second)


class BlocksWeight(PreparedWeight):
    """Parts of blocks below each other; a gated weight has two, or one for both halves.

    Args:
        kernels: None: plain torch with the same integers.
    """

    def __init__(self, parts: Sequence[BlockRows], gated: bool, kernels: Kernels | None):
        first = parts[0]
        ins = first.rows_ON.shape[1] // first.form.size * first.form.block
        super().__init__(sum(len(part.rows_ON) for part in parts), ins, gated, kernels)
        if kernels is None:
            self.parts = [(part.form, part.form.codes(part.rows_ON)) for part in parts]
            return
        if gated and len(parts) == 1:
            parts = first.split()
        panels = [-(-len(part.rows_ON) // PANEL) for part in parts]
        sizes = [part.form.record * (ins // part.form.block) for part in parts]
        self.data = empty_in_huge_pages(sum(map(int.__mul__, panels, sizes)), torch.uint8)
        table, start = [len(parts)], 0
        for part, count, size in zip(parts, panels, sizes, strict=True):
            # The panels of a gated weight take turns, so that memory is read in order.
            stride = sum(sizes) if gated else size
            table += [start, stride, part.form.number, count]
            _pack(part, self.data[start:], stride, size)
            start += size if gated else size * count
        self.blocks = torch.tensor(table)
        if len(parts) == 1:
            self.rows = self._rows

    def run(self, kernels: Kernels, x_TI: Tensor, bias: int | None, y_TW: Tensor) -> None:
        kernels.linear_blocks(
            x_TI.data_ptr(), x_TI.stride(0), self.data.data_ptr(), self.blocks.data_ptr(), bias, y_TW.data_ptr(),
            y_TW.shape[1], len(x_TI), self.padded, self.ins, self.kernel_act,
        )  # fmt: skip

    def reference(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The definition."""
        x_TI = x_TI.reshape(-1, self.ins)
        found = [_product(x_TI, form, codes) for form, codes in self.parts]
        return self.rounded(torch.cat(found, 1), bias_O, x_TI.dtype)

    def _rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight, [T, I]: the lookup in an embedding table."""
        ids_T = ids_T.long().contiguous()
        found_TI = torch.empty((len(ids_T), self.ins), dtype=torch.bfloat16)
        if self.kernels is not None:
            self.kernels.block_rows(
                self.data.data_ptr(), self.blocks.data_ptr(), ids_T.data_ptr(), found_TI.data_ptr(), *found_TI.shape
            )  # fmt: skip
        return found_TI

    def kernel_args(self) -> dict[str, Any]:
        return addresses(data=self.data, blocks=self.blocks)


def _product(x_TI: Tensor, form: BlockForm, codes: BlockCodes) -> Tensor:
    group = form.group
    scale_OG, minimum_OG = codes.numbers(x_TI.shape[1] // group)
    y_TO = torch.zeros(len(x_TI), len(codes.q_OI))
    for start in range(0, x_TI.shape[1], STEP):
        x_TS, scale_T = quantize(x_TI[:, start : start + STEP])
        for at in range(start, start + STEP, group):
            g, x_TG = at // group, x_TS[:, at - start : at - start + group].double()
            sum_T1 = x_TG.sum(1, keepdim=True)
            sums = x_TG @ codes.q_OI[:, at : at + group].double().T - form.zero * sum_T1
            y_TO += sums.float() * (scale_T[:, None] * scale_OG[:, g])
            if minimum_OG is not None:
                y_TO -= minimum_OG[:, g] * (scale_T[:, None] * sum_T1.float())
    return y_TO


def _pack(part: BlockRows, into: Tensor, stride: int, size: int) -> None:
    """Write the panels of a part, `stride` bytes from one to the next."""
    form, rows_ON = part.form, part.rows_ON
    ins = rows_ON.shape[1] // form.size * form.block
    each = max(1, AT_ONCE // (ins * PANEL)) * PANEL
    for panel, rows in zip(range(0, len(rows_ON), each), rows_ON.split(each), strict=True):
        missing = -len(rows) % PANEL
        records_PN = _records(form, form.codes(F.pad(rows, (0, 0, 0, missing)))).flatten(1)
        shape = (len(records_PN), size)
        into[panel // PANEL * stride :].as_strided(shape, (stride, 1)).copy_(records_PN)


def _records(form: BlockForm, codes: BlockCodes) -> Tensor:
    """[P, B, record]: the layout of kernels/gemm_blocks.cpp."""
    blocks = codes.d_OB.shape[1]

    def of_panels(value_OX: Tensor) -> Tensor:
        """[O, B * n] -> bytes [P, B, n * 32], outputs innermost."""
        bytes_OX = value_OX.contiguous().view(torch.uint8)
        each = value_OX.itemsize
        by_panel = bytes_OX.view(-1, PANEL, blocks, value_OX.shape[1] // blocks, each)
        return by_panel.permute(0, 2, 3, 1, 4).flatten(2)

    ds, factors = [codes.d_OB, codes.dmin_OB], [codes.factor_OG, codes.least_OG]
    parts = [of_panels(value) for value in (*ds, *factors) if value is not None]
    # [P, B, chunk, line, part, 16 outputs, 4 inputs]
    q = codes.q_OI.view(torch.uint8).view(-1, 2, 16, blocks, form.block // 32, 8, 4)
    lines = q.permute(0, 3, 4, 5, 1, 2, 6).flatten(5)
    if form.bits == 8:
        chunks = lines.transpose(3, 4).flatten(3)
    else:
        chunks = (lines[..., 0, :] & 15 | lines[..., 1, :] << 4).flatten(3)
        if more := form.bits - 4:
            high = (lines >> 4).unflatten(3, (-1, 4 // more)).flatten(4, 5)  # units of a line
            shifts = torch.arange(0, 8, more, dtype=torch.uint8)[:, None]
            chunks = torch.cat([chunks, (high << shifts).sum(4, dtype=torch.uint8).flatten(3)], 3)
    return torch.cat([*parts, chunks.flatten(2)], 2)


# ------------------------------------------------------------------------------------ loading


class BlocksFormat(CheckpointFormat):
    """The rows of each part as bytes, in one flat tensor.

    Args:
        kinds: of the parts, in order. names: of their tensors in checkpoints.
    """

    def __init__(self, kinds: Sequence[str], names: Sequence[str]):
        self.kinds, self.names = tuple(kinds), tuple(names)

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        widths = tuple(num_in // FORMS[kind].block * FORMS[kind].size for kind in self.kinds)
        return {"weight": StoredTensor((num_out,), torch.uint8, widths=widths)}

    def convert(self, ref: WeightRef) -> PreparedWeight:
        bytes_N = ref.tensor("weight")
        form = [FORMS[kind] for kind in self.kinds]
        widths = [ref.num_in // each.block * each.size for each in form]
        lengths = [outs * width for outs, width in zip(ref.outputs, widths, strict=True)]
        parts = [
            BlockRows(kind, part.view(-1, width))
            for kind, part, width in zip(self.kinds, bytes_N.split(lengths), widths, strict=True)
        ]
        return BlocksWeight(_merged(parts), ref.gated, kernels_for(ref.dtype))


def _merged(parts: Sequence[BlockRows]) -> list[BlockRows]:
    """Neighbours of one type as one part."""
    found = [parts[0]]
    for part in parts[1:]:
        if part.kind == found[-1].kind:
            found[-1] = BlockRows(part.kind, torch.cat([found[-1].rows_ON, part.rows_ON]))
        else:
            found.append(part)
    return found


def set_block_formats(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Let each weight keep its blocks whose parts all have a form that the kernels multiply. The model is still on "meta".

    `kinds`: type of each stored tensor, by checkpoint name; * is the number of any expert.
    """
    paths = {layer: path for path, layer in named_layers(model)}
    tables = list(_tables(model))
    for ref in [*weights_of(model), *tables]:
        names = [f"{name}.weight" for name in _names(ref, paths[ref.layer])]
        found = [kinds.get(name) or kinds.get(EXPERT.sub(".*.", name), "") for name in names]
        if len(found) > 1 and not any(found) and ref.packed:
            names = [f"{paths[ref.layer].rpartition('.')[0]}.{ref.packed}.weight"]
            found = [kinds.get(names[0], "")] * len(found)
        if _fits(ref, found):
            ref.use(BlocksFormat(found, names))
            if ref in tables and isinstance(ref.layer, Embedding):
                ref.layer.table = ref


def block_names(model: nn.Module) -> set[str]:
    """The stored tensors that weights keep as bytes."""
    forms = (ref.format for ref in weights_of(model))
    return {name for form in forms if isinstance(form, BlocksFormat) for name in form.names}


def _names(ref: WeightRef, path: str) -> list[str]:
    return [path] if isinstance(ref.layer, Embedding) else ref.checkpoint_names(path)


def _tables(model: nn.Module) -> Iterable[WeightRef]:
    """The tables of embeddings that no head shares."""
    shared = {ref.layer for ref in weights_of(model)}
    for layer in model.modules():
        if isinstance(layer, Embedding) and layer not in shared:
            yield TableRef(layer, *reversed(layer.weight.shape))


def _fits(ref: WeightRef, kinds: Sequence[str]) -> bool:
    """Whether the kernels multiply a weight whose parts have these types."""
    if ref.exact or kernels_for(ref.dtype) is None or not all(kind in FORMS for kind in kinds):
        return False
    whole = len(set(kinds)) == 1 or all(outs % PANEL == 0 for outs in ref.outputs)
    return whole and (not ref.gated or ref.num_out % (2 * PANEL) == 0)
