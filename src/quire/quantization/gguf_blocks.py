"""GGUF's blocks on the CPU: the stored integers, repacked; activations dynamically int8.

Knows one weight, not the bits of a block (`gguf_forms.py`). Batch-invariant, as int4: integers sum exactly within a block,
blocks are added in order.

    y = bias + sum over blocks of  scale_x * (d * sum (x_q * factor * (q - zero)) - dmin * sum (x_q * least))
    x_q = round(127 x / max |x of the block|),    w = d * factor * (q - zero) - dmin * least, exactly the file's

A block has 32 inputs, or 256 in the types whose groups have integer factors (llama.cpp quantizes x likewise).

Shape suffixes: T tokens, I inputs, O outputs, G groups, B blocks, N bytes of a row, P panels of 32 outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.layers.checkpoint_tensor import CheckpointTensor
from quire.layers.embedding import Embedding, TableRef
from quire.layers.prepared_weight import PANEL, PreparedWeight, addresses
from quire.layers.weight_slots import named_layers
from quire.layers.weights import CheckpointFormat, WeightRef, weights_of
from quire.ops.cpu.bindings import Kernels, best
from quire.platforms.memory import empty_in_huge_pages
from quire.quantization.checkpoint_format import kernels_for
from quire.quantization.gguf_forms import FORMS, BlockCodes, BlockForm
from quire.quantization.int8 import quantize
from quire.quantization.packing import Packing

EXPERT = re.compile(r"\.\d+\.(?=[^.]+\.weight$)")
MAX_UNPACKED = 1 << 20  # weights that are unpacked at a time


class BlockRows(NamedTuple):
    """Rows of a weight as the file stores them, [O, N], all of one type."""

    kind: str
    rows_ON: Tensor

    @property
    def form(self) -> BlockForm:
        return FORMS[self.kind]

    def split(self, lengths: Sequence[int]) -> list[BlockRows]:
        """`lengths[i]` rows in part i."""
        return [BlockRows(self.kind, rows_ON) for rows_ON in self.rows_ON.split(list(lengths))]


class BlocksWeight(PreparedWeight):
    """Parts of blocks below each other; a gated weight has two, or one for both halves.

    Args:
        kernels: None: plain torch with the same integers.
        packing: completes the weight later.
    """

    def __init__(
        self,
        parts: Sequence[BlockRows],
        gated: bool,
        kernels: Kernels | None,
        packing: Packing | None = None,
    ):
        first = parts[0]
        ins = first.rows_ON.shape[1] // first.form.size * first.form.block
        super().__init__(sum(len(part.rows_ON) for part in parts), ins, gated, kernels)
        if kernels is None:
            self.parts = [(part.form, part.form.codes_of(part.rows_ON)) for part in parts]
            return
        if gated and len(parts) == 1:
            parts = first.split([self.outs // 2] * 2)
        panels = [-(-len(part.rows_ON) // PANEL) for part in parts]
        sizes = [part.form.record * (ins // part.form.block) for part in parts]
        self.data = empty_in_huge_pages(sum(map(int.__mul__, panels, sizes)), torch.uint8)
        table, start, now = [len(parts)], 0, packing or Packing(kernels.pack_blocks)
        for part, count, size in zip(parts, panels, sizes, strict=True):
            # The panels of a gated weight take turns, so that memory is read in order.
            stride = sum(sizes) if gated else size
            table += [start, stride, part.form.number, count]
            _pack(part, self.data.data_ptr() + start, stride, now)
            start += size if gated else size * count
        if packing is None:
            now.finish()
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
    q_OI = codes.q_OI.double() - form.zero
    whole_OI = q_OI * _repeated(codes.factor_OG, q_OI)
    least_OI = _repeated(codes.least_OG, q_OI)
    y_TO = torch.zeros(len(x_TI), len(q_OI))
    for block, start in enumerate(range(0, x_TI.shape[1], form.step)):
        inputs = slice(start, start + form.step)
        x_TS, scale_T = quantize(x_TI[:, inputs])
        exact_TS = x_TS.double()
        part_TO = (exact_TS @ whole_OI[:, inputs].T).float() * (
            codes.unit * codes.d_OB[:, block].float()
        )
        if codes.dmin_OB is not None:
            minima_TO = (exact_TS @ least_OI[:, inputs].T).float()
            part_TO -= minima_TO * codes.dmin_OB[:, block].float()
        y_TO += part_TO * scale_T[:, None]
    return y_TO


def _repeated(numbers_OG: Tensor | None, like_OI: Tensor) -> Tensor:
    """The number of its group for each input; 1 if groups have none."""
    if numbers_OG is None:
        return torch.ones_like(like_OI)
    return numbers_OG.double().repeat_interleave(like_OI.shape[1] // numbers_OG.shape[1], 1)


def _pack(part: BlockRows, into: int, stride: int, packing: Packing) -> None:
    """Write the panels of a part to the address `into`, `stride` bytes from one to the next."""
    form, rows_ON = part.form, part.rows_ON
    ins, each = rows_ON.shape[1] // form.size * form.block, len(rows_ON)
    if form.plain:
        each = max(1, MAX_UNPACKED // (ins * PANEL)) * PANEL
    for panel, rows in zip(range(0, len(rows_ON), each), rows_ON.split(each), strict=True):
        taken = form.plain_rows(rows) if form.plain else rows
        where = [taken.data_ptr(), taken.stride(0), len(taken), into + panel // PANEL * stride]
        blocks = ins // (form.plain or form.block)
        packing.add([*where, stride, form.number, blocks], taken)


# ------------------------------------------------------------------------------------ loading


class BlocksFormat(CheckpointFormat):
    """The rows of each part as bytes, in one flat tensor.

    Args:
        kinds: of the parts, in order. names: of their tensors in checkpoints.
    """

    def __init__(self, kinds: Sequence[str], names: Sequence[str], packing: Packing | None):
        self.kinds, self.names, self.packing = tuple(kinds), tuple(names), packing

    def stored(
        self, num_in: int, num_out: int, dtype: torch.dtype
    ) -> Mapping[str, CheckpointTensor]:
        widths = tuple(num_in // FORMS[kind].block * FORMS[kind].size for kind in self.kinds)
        return {"weight": CheckpointTensor((num_out,), torch.uint8, widths=widths)}

    def convert(self, ref: WeightRef) -> PreparedWeight:
        pieces = [piece for _, piece in ref.pieces("weight")]
        if len(pieces) != len(self.kinds):  # a tensor of several parts
            forms = [FORMS[kind] for kind in self.kinds]
            widths = [ref.num_in // form.block * form.size for form in forms]
            lengths = [outs * width for outs, width in zip(ref.outputs, widths, strict=True)]
            pieces = list(
                torch.cat(pieces).split(lengths) if len(pieces) > 1 else pieces[0].split(lengths)
            )
        parts = [
            BlockRows(kind, piece.view(outs, -1))
            for kind, piece, outs in zip(self.kinds, pieces, ref.outputs, strict=True)
        ]
        if any(outs % PANEL for outs in ref.outputs):  # all have one type
            parts = [BlockRows(self.kinds[0], torch.cat([part.rows_ON for part in parts]))]
        return BlocksWeight(parts, ref.gated, kernels_for(ref.dtype), self.packing)

    def finish(self) -> None:
        if self.packing is not None:
            self.packing.finish()


def set_block_formats(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Let each weight keep its blocks whose parts all have a form that the kernels multiply. The model is still on "meta".

    `kinds`: type of each stored tensor, by checkpoint name; * is the number of any expert.
    """
    kernels = best()
    packing = None if kernels is None else Packing(kernels.pack_blocks)
    paths = {layer: path for path, layer in named_layers(model)}
    tables = list(_tables(model))
    for ref in [*weights_of(model), *tables]:
        names = [f"{name}.weight" for name in _names(ref, paths[ref.layer])]
        found = [kinds.get(name) or kinds.get(EXPERT.sub(".*.", name), "") for name in names]
        if len(found) > 1 and not any(found) and ref.packed:
            names = [f"{paths[ref.layer].rpartition('.')[0]}.{ref.packed}.weight"]
            found = [kinds.get(names[0], "")] * len(found)
        if _fits(ref, found):
            ref.use(BlocksFormat(found, names, packing))
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
            yield TableRef(layer, *reversed(layer.weight.shape), shares=layer.shares)


def _fits(ref: WeightRef, kinds: Sequence[str]) -> bool:
    """Whether the kernels multiply a weight whose parts have these types."""
    if ref.exact or kernels_for(ref.dtype) is None or not all(kind in FORMS for kind in kinds):
        return False
    whole = len(set(kinds)) == 1 or all(outs % PANEL == 0 for outs in ref.outputs)
    return whole and (not ref.gated or ref.num_out % (2 * PANEL) == 0)
