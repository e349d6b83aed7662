"""Apply a quantization method to a model, weight by weight; the tables of methods and checkpoint schemes.

Knows models, methods and checkpoint schemes by name. Does not know the tensors of any scheme.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from quire.config.quantization import CheckpointQuantization
from quire.errors import Unsupported
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import UNQUANTIZED, Linear
from quire.ops.cpu.bindings import best
from quire.quantization.awq import Awq
from quire.quantization.base import PreparedLinearMethod, Weight, free_weight, install_weight
from quire.quantization.bf16_packed import PackedBf16Weight
from quire.quantization.checkpoint_scheme import CheckpointLinearMethod, Make, kernels_for
from quire.quantization.compressed_tensors import CompressedInt8, CompressedPacked
from quire.quantization.fp8 import Float8Weight
from quire.quantization.fp8_checkpoint import Float8, Float8Kept
from quire.quantization.gptq import Gptq
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight
from quire.quantization.int8_codes import Int8Codes
from quire.quantization.wna16 import FewBitsWeight

ONLINE: dict[str, Make] = {
    "int8": Int8Weight.of,
    "int4": Int4Weight.of,
    "int4_g64": partial(Int4Weight.of, group=64),
    "int4_g32": partial(Int4Weight.of, group=32),
    "fp8": Int8Weight.of,
}
"""`--quantization` -> how to make a weight of this method from 16 or 32 bits, on the CPU."""

APART: dict[str, Make] = {
    "fp8": Float8Weight.of,
    "int8": Int8Codes.of,
    "int4": FewBitsWeight.int4,
    "int4_g64": partial(FewBitsWeight.int4, group=64),
    "int4_g32": partial(FewBitsWeight.int4, group=32),
}
"""The same on an accelerator. The LM head stays as it is: e4m3 has too few mantissa bits for logits."""

HEADS: dict[str, Make] = dict.fromkeys(ONLINE, Int8Weight.of)
"""The same for the LM head on the CPU: always int8, because 4 bits cost the head more quality than other layers."""

FORMATS: dict[str, type[CheckpointLinearMethod]] = {
    "gptq": Gptq,
    "awq": Awq,
    "ct-int": CompressedInt8,
    "ct-packed": CompressedPacked,
    "float": Float8,
}
"""`WeightLayout.kind` (config/quantization.py) -> checkpoint scheme."""


def expect_stored(
    model: nn.Module, stored: CheckpointQuantization, online: str | None, apart: bool = False
) -> int:
    """Set the checkpoint scheme of each quantized linear layer, before weights are loaded; return how many.

    `online`: the method for fp8 weights, if not int8; `apart`: the model runs on an accelerator, which keeps fp8
    weights unless another method is requested.

    Raises:
        Unsupported: the checkpoint stores the parts of one layer in different ways.
    """
    count = 0
    for path, layer in list(model.named_modules()):
        if not isinstance(layer, Linear):
            continue
        parent = path.rpartition(".")[0]
        names = [f"{parent}.{part}" for part in layer.parts] or [path]
        layouts = [stored.layout_of(name) for name in names]
        if any(layout != layouts[0] for layout in layouts):
            raise Unsupported(
                f"a checkpoint whose {', '.join(names)} are quantized in different ways",
                "quantize all of them alike, or none",
            )
        if (layout := layouts[0]) is not None:
            kept = apart and layout.kind == "float" and online in (None, "fp8")
            form = Float8Kept if kept else FORMATS[layout.kind]
            layer.use(form(layout, (APART if apart else ONLINE)[online or "int8"], apart))
            count += 1
    return count


def largest_first(model: nn.Module) -> list[nn.Module]:
    """The modules, LM heads first: converting the largest weight needs temporary memory, which is free at the start."""
    return sorted(model.modules(), key=lambda module: not isinstance(module, Head))


def quantize_layer(layer: Linear, name: str, apart: bool = True) -> None:
    """Quantize one unquantized linear layer by method `name`."""
    layer.join()
    if apart:  # do not load the CPU kernels: that may compile them
        install_weight(layer, APART[name](layer.weight, layer.silu, None))
    else:
        install_weight(
            layer, ONLINE[name](layer.weight, layer.silu, kernels_for(layer.weight.dtype))
        )


def quantize_model(model: nn.Module, name: str, apart: bool = False) -> int:
    """Quantize every unquantized linear layer and the LM head by method `name`; return how many.

    The embedding's table stays as it is; so does the LM head on an accelerator (`apart`).
    """
    count = 0
    for layer in largest_first(model):
        if isinstance(layer, Linear) and layer.quant_method is UNQUANTIZED:
            quantize_layer(layer, name, apart)
            count += 1
        elif isinstance(layer, Head) and layer.plain and not apart:
            layer.join()
            kernels = kernels_for(layer.table_VD.dtype)
            weight = HEADS[name](layer.table_VD, False, kernels)  # keep no reference: it is freed
            layer.multiply = weight.multiply
            if layer.table is layer:
                free_weight(layer, weight.outs, weight.ins)
            count += 1
    return count


def pack_model(model: nn.Module) -> int:
    """Pack the bfloat16 weights that the CPU kernels take; return how many. At most one weight exists twice."""
    kernels = best()
    if kernels is None:
        return 0
    count = 0
    tables: dict[int, PackedBf16Weight] = {}
    for layer in largest_first(model):
        if isinstance(layer, Linear) and layer.quant_method is UNQUANTIZED:
            layer.join()
            if PackedBf16Weight.takes(layer.weight, layer.silu):
                install_weight(layer, PackedBf16Weight(kernels, layer.weight, layer.silu))
                count += 1
        elif isinstance(layer, Head) and layer.plain:
            layer.join()
            if PackedBf16Weight.takes(layer.table_VD):
                tables[id(layer.table)] = packed = PackedBf16Weight(kernels, layer.table_VD)
                layer.multiply = packed.multiply
                free_weight(layer.table, packed.outs, packed.ins)
                count += 1
    for layer in model.modules():
        if isinstance(layer, Embedding) and id(layer) in tables:
            layer.rows = tables[id(layer)].rows
    return count


def made_weights(model: nn.Module) -> list[Weight]:
    """The weights of linear layers and LM heads that are quantized or packed."""
    weights = [
        m.quant_method.weight
        for m in model.modules()
        if isinstance(m, Linear) and isinstance(m.quant_method, PreparedLinearMethod)
    ]
    return weights + [
        w
        for m in model.modules()
        if isinstance(m, Head) and isinstance(w := getattr(m.multiply, "__self__", None), Weight)
    ]


def move(model: nn.Module, device: torch.device) -> None:
    """Move all weights, prepared or not, to another device."""
    model.to(device)
    for weight in made_weights(model):
        weight.to(device)


def bytes_held(model: nn.Module) -> int:
    """Bytes of all weights, prepared or not."""
    held: list[Tensor] = [p for p in model.parameters() if not p.is_meta]
    held += [t for weight in made_weights(model) for t in weight.tensors()]
    # By address: memory that several layers share counts once (tied tables, buffers that layers use in turn).
    return sum(size for _, _, size in {(t.device, t.data_ptr(), t.nbytes) for t in held})
