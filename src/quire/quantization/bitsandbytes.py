"""bitsandbytes checkpoints: NF4 or FP4 in blocks of the flat weight; int8 with one scale per output.

4 bits: w[n] = map[code[n]] * absmax[n // blocksize], codes in row-major order, the first in the high half of a byte. `absmax`
may itself be codes of 8 bits: absmax[b] = nested_map[code[b]] * nested_absmax[b // 256] + offset. `quant_state` is JSON.
8 bits: w[o, i] = weight[o, i] * SCB[o] / 127.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor


def parts_of_4bit(found: Mapping[str, Tensor]) -> list[str]:
    """The parts that a weight needs."""
    names = ["weight", "weight.absmax", "weight.quant_map", "weight.quant_state"]
    absmax = found.get("weight.absmax")
    if absmax is not None and absmax.dtype == torch.uint8:
        names += ["weight.nested_absmax", "weight.nested_quant_map"]
    return names


def decode_4bit(found: Mapping[str, Tensor]) -> Tensor:
    """[O, I], float32: the codes can be found again."""
    state = json.loads(bytes(found["weight.quant_state"].view(torch.uint8).tolist()))
    absmax, size = found["weight.absmax"], int(state["blocksize"])
    if absmax.dtype == torch.uint8:
        nested = _mapped(absmax, found["weight.nested_quant_map"])
        per = int(state["nested_blocksize"])
        absmax = _scaled(nested, found["weight.nested_absmax"], per)
        absmax = absmax + float(state["nested_offset"])
    bytes_ = found["weight"].flatten()
    if (count := math.prod(state["shape"])) != 2 * len(bytes_):
        raise ValueError(f"its quant_state has {count} values, but weight has {2 * len(bytes_)}")
    parts, step = [], 1 << 19  # bytes at a time
    step -= step % size
    for start in range(0, len(bytes_), step):
        part = bytes_[start : start + step]
        codes = torch.stack([part >> 4, part & 15], 1).flatten()
        first = 2 * start // size
        scale = absmax[first : first + -(-len(codes) // size)]
        parts.append(_scaled(_mapped(codes, found["weight.quant_map"]), scale, size))
    return torch.cat(parts).view(state["shape"])


def _mapped(codes: Tensor, values: Tensor) -> Tensor:
    return values.float().index_select(0, codes.int())


def _scaled(values: Tensor, scale: Tensor, size: int) -> Tensor:
    whole = len(values) // size * size
    if -(-len(values) // size) != len(scale):
        raise ValueError(f"{len(values)} values in blocks of {size} have {len(scale)} scales")
    main = (values[:whole].view(-1, size) * scale[: whole // size, None]).flatten()
    return torch.cat([main, values[whole:] * scale[-1]])


def int8_scale(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The scale as compressed-tensors names it."""
    return {"weight_scale": found["SCB"].float() / 127}
