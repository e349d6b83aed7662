"""Random weights for a model without a checkpoint.

Knows the names and shapes that layers give. Does not know the layers of any family.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.layers.weight_slots import Layer, slots_of

LARGE = 1 << 22  # elements; larger tensors are drawn on the device


def random_tensors(
    model: nn.Module, seed: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """A random tensor for every slot, from (seed, name) alone: small normal values; norms near one.

    Activations stay as small as in a freshly initialized model, so that one can test speed and wiring without
    a download. Large tensors are drawn on the device and differ between kinds of devices; a model with only small
    tensors is the same everywhere.
    """
    done: set[tuple[int, str]] = set()
    for name, slot in slots_of(model).items():
        if slot.dim is None:
            if (id(slot.layer), slot.name) in done:
                continue
            if slot.is_alternative:
                continue  # filled part by part, so that fused and split checkpoints get the same weights
        done.add((id(slot.layer), slot.name))
        like = slot.layer.get_parameter(slot.name)
        if slot.optional:
            continue
        where = device if math.prod(slot.shape()) >= LARGE else "cpu"
        draw = torch.Generator(where).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        tensor = torch.empty(slot.shape(), dtype=like.dtype, device=where)
        if not tensor.is_floating_point():
            yield name, tensor.zero_()
            continue
        if tensor.itemsize == 1:
            yield (
                name,
                torch.empty(slot.shape(), device=where).normal_(generator=draw).to(tensor.dtype),
            )
            continue
        tensor.normal_(0.0, 0.02, generator=draw)
        if isinstance(slot.layer, Layer) and slot.layer.random_mean:
            tensor += slot.layer.random_mean
        yield name, tensor
