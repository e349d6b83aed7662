"""Apply quantization methods and checkpoint formats to a model, weight by weight; the tables of both.

Knows methods and formats by name, and the weights that layers list. Does not know any layer, or the tensors of any format.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from quire.config.checkpoint_quantization import CheckpointQuantization
from quire.errors import Unsupported
from quire.layers.prepared_weight import PreparedWeight
from quire.layers.weight_slots import named_layers
from quire.layers.weights import WeightRef, layer_weights, weight_tensors, weights_of
from quire.ops.cpu.bindings import best
from quire.quantization.awq import AwqFormat
from quire.quantization.bf16_packed import pack_later
from quire.quantization.checkpoint_format import Make, QuantizedFormat, kernels_for
from quire.quantization.codebooks import BOOKS, READ, CodedFormat
from quire.quantization.compressed_tensors import CompressedInt8Format, CompressedPackedFormat
from quire.quantization.fp8 import Float8Weight
from quire.quantization.fp8_checkpoint import Fp8Format, RequantizedFp8Format
from quire.quantization.gptq import GptqFormat
from quire.quantization.int4 import GROUP, Int4Weight
from quire.quantization.int8 import Int8Codes, Int8Weight
from quire.quantization.online import quantize_later
from quire.quantization.packing import Packing
from quire.quantization.wna16 import FewBitsWeight

ONLINE: dict[str, Make] = {
    "int8": Int8Weight.of,
    "int4": Int4Weight.of,
    "int4_g64": partial(Int4Weight.of, group=64),
    "int4_g32": partial(Int4Weight.of, group=32),
    "nf4": BOOKS["nf4"].of,
    "fp8": Int8Weight.of,
}
"""`--quantization` -> what quantizes a weight of 16 or 32 bits, on the CPU."""

GROUPS = {"int8": 0, "fp8": 0, "int4": GROUP, "int4_g64": 64, "int4_g32": 32}
"""Methods by which the CPU kernels quantize many weights at once -> inputs of a group; 0: int8."""

ON_ACCELERATOR: dict[str, Make] = {
    "fp8": Float8Weight.of,
    "int8": Int8Codes.of,
    "int4": FewBitsWeight.int4,
    "int4_g64": partial(FewBitsWeight.int4, group=64),
    "int4_g32": partial(FewBitsWeight.int4, group=32),
    "nf4": partial(FewBitsWeight.int4, group=64),
}
"""The same on an accelerator. The LM head stays as it is: e4m3 has too few mantissa bits for logits."""

HEADS: dict[str, Make] = dict.fromkeys(ONLINE, Int8Weight.of)
"""The same for the LM head on the CPU: always int8, because 4 bits cost the head more quality than other layers."""

FORMATS: dict[str, type[QuantizedFormat]] = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "ct-int": CompressedInt8Format,
    "ct-packed": CompressedPackedFormat,
    "float": RequantizedFp8Format,
}
"""`WeightLayout.kind` (config/quantization.py) -> checkpoint format."""


def set_formats(
    model: nn.Module, stored: CheckpointQuantization, online: str | None, accelerator: bool = False
) -> int:
    """Set the checkpoint format of each quantized weight, before weights are loaded; return how many.

    `online`: the method for fp8 weights, if not int8; `accelerator`: the model runs on one, which keeps fp8 weights unless
    another method is requested.

    Raises:
        Unsupported: the checkpoint stores the parts of one weight in different ways.
    """
    count = 0
    for path, layer in named_layers(model):
        for ref in layer_weights(layer):
            if ref.layer is not layer or ref.exact:  # (a head may be tied to the embeddings)
                continue
            names = ref.checkpoint_names(path)
            layouts = [stored.layout_of(name) for name in names]
            if all(each is None or each.kind == "decoded" for each in layouts):  # arrive as floats
                count += layouts[0] is not None
                kernels = None if accelerator or online else kernels_for(ref.dtype)
                readers = {each.reader if each is not None else "" for each in layouts}
                if kernels is not None and len(readers) == 1 and (reader := readers.pop()) in READ:
                    ref.use(CodedFormat(reader, kernels))
                continue
            layout = layouts[0]
            if layout is None or any(each != layout for each in layouts):
                raise Unsupported(
                    f"a checkpoint whose {', '.join(names)} are quantized in different ways",
                    "quantize all of them in the same way, or none",
                )
            count += 1
            keeps_fp8 = accelerator and layout.kind == "float" and online in (None, "fp8")
            form = Fp8Format if keeps_fp8 else FORMATS[layout.kind]
            make = (ON_ACCELERATOR if accelerator else ONLINE)[online or "int8"]
            ref.use(form(layout, make, accelerator))
    return count


def convert_weights(refs: Iterable[WeightRef]) -> None:
    """Convert the loaded tensors of a quantized checkpoint."""
    formats = []
    for ref in refs:
        formats.append(ref.format)
        ref.convert()
    for form in dict.fromkeys(formats):
        form.finish()


def quantize_weight(ref: WeightRef, method: str, accelerator: bool = False) -> bool:
    """Quantize a weight by `method`; whether it was: prepared and exact weights stay, and the LM head on an accelerator."""
    if ref.prepared is not None or ref.exact or (accelerator and ref.is_head):
        return False
    ref.join()
    if accelerator:  # do not load the CPU kernels: that may compile them
        prepared = ON_ACCELERATOR[method](ref.weight, ref.gated, None)
    else:
        make = HEADS[method] if ref.is_head else ONLINE[method]
        prepared = make(ref.weight, ref.gated, kernels_for(ref.weight.dtype))
    ref.install(prepared)
    return True


def quantize_weights(refs: Iterable[WeightRef], method: str, accelerator: bool = False) -> int:
    """Quantize each weight by `method`; return how many. The embedding's table is not among them.

    On a CPU the kernels quantize many at once, and few megabytes exist twice at a time.
    """
    kernels = None if accelerator or method not in GROUPS else best()
    packing = None if kernels is None else Packing(kernels.quantize_weights)
    count = 0
    for ref in refs:
        if ref.prepared is not None or ref.exact:
            continue
        if kernels is None or packing is None or ref.is_head:
            done = False
        else:
            done = quantize_later(ref, packing, kernels, GROUPS[method])
        count += done or quantize_weight(ref, method, accelerator)
    if packing is not None:
        packing.finish()
    return count


def pack_weights(refs: Iterable[WeightRef]) -> int:
    """Pack the bfloat16 weights that the CPU kernels take; return how many. Few megabytes exist twice at a time."""
    kernels = best()
    if kernels is None:
        return 0
    packing = Packing(kernels.pack_weights)
    count = sum(pack_later(ref, packing, kernels) for ref in refs if ref.prepared is None)
    packing.finish()
    return count


def prepared_weights(model: nn.Module) -> list[PreparedWeight]:
    """The weights that are quantized or packed."""
    return [ref.prepared for ref in weights_of(model) if ref.prepared is not None]


def move(model: nn.Module, device: torch.device) -> None:
    """Move all weights, prepared or not, to another device."""
    # `to` refuses a model with "meta" tensors
    model._apply(lambda t: t if t.is_meta else t.to(device))
    for prepared in prepared_weights(model):
        prepared.move(device)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, prepared or not."""
    tensors: list[Tensor] = [p for p in model.parameters() if not p.is_meta]
    tensors += [each.tensor for each in weight_tensors(model)]
    # By address: memory that several layers share counts once (tied tables, buffers that layers use in turn).
    return sum(size for _, _, size in {(t.device, t.data_ptr(), t.nbytes) for t in tensors})
