"""Apply quantization methods and checkpoint formats to a model, weight by weight; the registry of both.

Knows methods and formats by name, and the weights that layers list. Does not know any layer, or the tensors of any format.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

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
from quire.quantization.packing import Packing
from quire.quantization.quantize_on_load_cpu import quantize_later
from quire.quantization.wna16 import FewBitsWeight


class WeightMakers(NamedTuple):
    """What quantizes a weight of 16 or 32 bits.

    Attributes:
        on_cpu: a linear layer's weight; the LM head is always int8 there, because 4 bits cost the head more quality.
        on_accelerator: the same there, where the LM head stays as it is: e4m3 has too few mantissa bits for logits.
        group: inputs of a group, where the CPU kernels quantize many weights at once; 0: int8; None: they do not.
    """

    on_cpu: Make
    on_accelerator: Make
    group: int | None = None


MAKERS = {
    "int8": WeightMakers(Int8Weight.of, Int8Codes.of, 0),
    "int4": WeightMakers(Int4Weight.of, FewBitsWeight.int4, GROUP),
    "int4_g64": WeightMakers(
        partial(Int4Weight.of, group=64), partial(FewBitsWeight.int4, group=64), 64
    ),
    "int4_g32": WeightMakers(
        partial(Int4Weight.of, group=32), partial(FewBitsWeight.int4, group=32), 32
    ),
    "nf4": WeightMakers(BOOKS["nf4"].of, partial(FewBitsWeight.int4, group=64)),
    "fp8": WeightMakers(Int8Weight.of, Float8Weight.of, 0),
}
"""By value of `--quantization` (config/quantization.py, ONLINE)."""

FORMATS: dict[str, type[QuantizedFormat]] = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "ct-int": CompressedInt8Format,
    "ct-packed": CompressedPackedFormat,
    "float": RequantizedFp8Format,
}
"""`QuantizationScheme.kind` (config/quantization.py) -> checkpoint format."""


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
            schemes = [stored.scheme_of(name) for name in names]
            if all(each is None or each.kind == "decoded" for each in schemes):  # arrive as floats
                count += schemes[0] is not None
                kernels = None if accelerator or online else kernels_for(ref.dtype)
                readers = {each.reader if each is not None else "" for each in schemes}
                if kernels is not None and len(readers) == 1 and (reader := readers.pop()) in READ:
                    ref.use(CodedFormat(reader, kernels))
                continue
            scheme = schemes[0]
            if scheme is None or any(each != scheme for each in schemes):
                raise Unsupported(
                    f"a checkpoint whose {', '.join(names)} are quantized in different ways",
                    "quantize all of them in the same way, or none",
                )
            count += 1
            keeps_fp8 = accelerator and scheme.kind == "float" and online in (None, "fp8")
            checkpoint_format = Fp8Format if keeps_fp8 else FORMATS[scheme.kind]
            makers = MAKERS[online or "int8"]
            make = makers.on_accelerator if accelerator else makers.on_cpu
            ref.use(checkpoint_format(scheme, make, accelerator))
    return count


def convert_weights(refs: Iterable[WeightRef]) -> None:
    """Convert the loaded tensors of a quantized checkpoint."""
    formats = []
    for ref in refs:
        formats.append(ref.format)
        ref.convert()
    for checkpoint_format in dict.fromkeys(formats):
        checkpoint_format.finish()


def quantize_weight(ref: WeightRef, method: str, accelerator: bool = False) -> bool:
    """Quantize a weight by `method`; whether it was: prepared and exact weights stay, and the LM head on an accelerator."""
    if ref.prepared is not None or ref.exact or (accelerator and ref.is_head):
        return False
    ref.join()
    if accelerator:  # do not load the CPU kernels: that may compile them
        prepared = MAKERS[method].on_accelerator(ref.weight, ref.gated, None)
    else:
        make = Int8Weight.of if ref.is_head else MAKERS[method].on_cpu
        prepared = make(ref.weight, ref.gated, kernels_for(ref.weight.dtype))
    ref.install(prepared)
    return True


def quantize_weights(refs: Iterable[WeightRef], method: str, accelerator: bool = False) -> int:
    """Quantize each weight by `method`; return how many. The embedding's table is not among them.

    On a CPU the kernels quantize many at once, and few megabytes exist twice at a time.
    """
    group = MAKERS[method].group
    kernels = None if accelerator or group is None else best()
    packing = None if kernels is None else Packing(kernels.quantize_weights)
    count = 0
    for ref in refs:
        if ref.prepared is not None or ref.exact:
            continue
        if kernels is None or packing is None or group is None or ref.is_head:
            done = False
        else:
            done = quantize_later(ref, packing, kernels, group)
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
