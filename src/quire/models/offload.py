"""Weight offload: weights stay in host memory, and each layer is copied to the device ahead of its use.

Knows layers, two places on the device that they use in turn, and how copies and computation must be ordered. Does not
know streams or memory: the platform's `Copier` does.

    host      layer a      layer b      layer c      layer d   ...      spread over the model, so that each
                 │            │            │            │               copy overlaps with as many layers
    device    place 0      place 1      place 0      place 1
                 │
    copy of c:   begins when a has computed with place 0;  c computes when its copy is done

A layer always has the same place, so its tensors are fixed views of that place. Steps are not captured: a graph cannot
wait for a copy that began before it, and with offload the host's share of a step is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quire.layers.weights import TensorRef, weight_tensors, weights_of
from quire.logging import get_logger

log = get_logger(__name__)

CHUNK = 64 << 20  # bytes; PyTorch's pinned allocator rounds up to powers of two
ALIGNED = 256
PLACES = 2
GIB = 1 << 30

Pair = tuple[Tensor, Tensor]  # (destination, source): bytes


class Copier(Protocol):
    """A device's copies that overlap with computation."""

    def host(self, size: int) -> Tensor:
        """Allocate pinned bytes on the host."""
        ...

    def device(self, size: int) -> Tensor:
        """Allocate bytes on the device."""
        ...

    def mark(self) -> Any:
        """A mark after everything that the caller has queued on the device so far."""
        ...

    def copy(self, pairs: Sequence[Pair], after: Any) -> Any:
        """Queue copies that begin when the mark `after` is reached; returns the mark of their end."""
        ...

    def wait(self, mark: Any) -> None:
        """Make everything that the caller queues from now on wait for the mark."""
        ...


class Ring:
    """Tracks which layer is in which place, and orders copies and computation.

    Args:
        copies: for each offloaded layer, the copies from the host to its place: layer i uses place i % 2.
    """

    def __init__(self, copier: Copier, copies: Sequence[Sequence[Pair]]):
        self.copier, self.copies = copier, copies
        self.resident: list[int | None] = [None] * PLACES
        self.copied: list[Any] = [None] * PLACES

    def before(self, layer: int) -> None:
        """Make what is queued next wait for the layer's weights."""
        place = layer % PLACES
        if self.resident[place] != layer:  # the first pass, or one after a failed pass
            self._copy_in(layer)
        self.copier.wait(self.copied[place])

    def after(self, layer: int) -> None:
        """The layer is done in this pass: copy the next layer into its place."""
        following = layer + PLACES
        self._copy_in(following if following < len(self.copies) else layer % PLACES)

    def _copy_in(self, layer: int) -> None:
        place = layer % PLACES
        if self.resident[place] == layer:
            return
        self.resident[place] = layer
        self.copied[place] = self.copier.copy(self.copies[layer], after=self.copier.mark())


class Offload:
    """Implements `cpu_offload_gb`: frees at least this number of bytes of the device, if the layers have them.

    Args:
        num_bytes: how many to offload, at least.
    """

    def __init__(self, copier: Copier, num_bytes: int):
        self.copier, self.num_bytes = copier, num_bytes
        self.chosen: list[nn.Module] = []

    def choose(self, layers: Sequence[nn.Module], shrink: float = 1.0) -> set[nn.Module]:
        """Choose layers to offload, before the weights are loaded. Returns the layers in them that have weights, to be loaded on the host.

        Chooses two layers more than needed, since the two places stay on the device.

        Args:
            shrink: the size of a loaded weight, as a share of its size by shape and dtype.
        """
        sizes = [
            sum(p.nbytes for ref in weights_of(layer) for p in ref.parameters().values())
            for layer in layers
        ]
        size = shrink * max(sizes)
        count = min(len(layers), -int(-self.num_bytes // size) + PLACES)
        self.chosen = [layers[index * len(layers) // count] for index in range(count)]
        return {ref.layer for layer in self.chosen for ref in weights_of(layer)}

    def install(self) -> None:
        """Move the loaded weights into pinned memory and install the copies. Call once, after loading."""
        pinned = [_PinnedLayer(self.copier, weight_tensors(layer)) for layer in self.chosen]
        room = max(each.size for each in pinned)
        places = [self.copier.device(room) for _ in range(min(PLACES, len(pinned)))]
        ring = Ring(self.copier, [p.bind_to(places[i % PLACES]) for i, p in enumerate(pinned)])
        for index, layer in enumerate(self.chosen):
            layer.register_forward_pre_hook(lambda module, args, i=index: ring.before(i))
            layer.register_forward_hook(lambda module, args, out, i=index: ring.after(i))
        total = sum(each.size for each in pinned)
        self.chosen = []
        log.info(
            "cpu_offload_gb: %d layers (%.2f GiB) stay in host memory, with two buffers of %.2f GiB on the device;"
            " steps are not recorded as CUDA graphs",
            len(pinned), total / GIB, room / GIB,
        )  # fmt: skip


class _PinnedLayer:
    """A layer's tensors in pinned host memory, one after the other."""

    def __init__(self, copier: Copier, parts: Sequence[TensorRef]):
        self.parts: list[tuple[int, TensorRef]] = []
        self.size = 0
        for part in parts:
            self.parts.append((self.size, part))
            self.size += -(-part.tensor.nbytes // ALIGNED) * ALIGNED
        sizes = [min(CHUNK, self.size - start) for start in range(0, self.size, CHUNK)]
        self.chunks = [copier.host(size) for size in sizes]
        for index, (start, part) in enumerate(self.parts):
            self._write(start, part.tensor.contiguous().flatten().view(torch.uint8))
            # From now on only its shape is needed: free the memory, one tensor after the other.
            part.set(part.tensor.to("meta"))
            self.parts[index] = start, part._replace(tensor=part.tensor.to("meta"))

    def _write(self, offset: int, source: Tensor) -> None:
        while len(source):
            chunk = self.chunks[offset // CHUNK]
            start = offset % CHUNK
            piece = source[: len(chunk) - start]
            chunk[start : start + len(piece)].copy_(piece)
            offset, source = offset + len(piece), source[len(piece) :]

    def bind_to(self, place: Tensor) -> list[Pair]:
        """Make the tensors views of a place; returns the copies that fill it."""
        for start, part in self.parts:
            like = part.tensor
            part.set(place[start : start + like.nbytes].view(like.dtype).view(like.shape))
        starts = range(0, self.size, CHUNK)
        return [
            (place[start : start + len(chunk)], chunk)
            for start, chunk in zip(starts, self.chunks, strict=True)
        ]
