"""Weights that stay in the host's memory and are brought to the device for each forward pass, a layer ahead of its use.

Knows layers, two places on the device that they take in turn, and in which order copies and computing must come. Does not
know streams or memory: a `Copier`, which the platform gives, does.

    host      layer a      layer b      layer c      layer d   ...      spread over the model, so that each
                 │            │            │            │               copy has as many layers to hide behind
    device    place 0      place 1      place 0      place 1
                 │
    copy of c:   begins when what a computes with place 0 is done;  c computes when its copy is

A layer always has the same place, so its tensors are views of that place and never change. Steps are not recorded: a
graph cannot wait for a copy that was begun before it; and where weights travel, the host's share of a step is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.weight_slots import set_parameter
from quire.logging import get_logger
from quire.quantization.base import PreparedLinearMethod

log = get_logger(__name__)

CHUNK = 64 << 20  # bytes; the host's allocator rounds up to powers of two
ALIGNED = 256
PLACES = 2
GIB = 1 << 30

Pair = tuple[Tensor, Tensor]  # into, source: bytes


class Copier(Protocol):
    """A device's copies beside its computing."""

    def host(self, size: int) -> Tensor:
        """Bytes of the host that the device reads by itself."""
        ...

    def device(self, size: int) -> Tensor:
        """Bytes of the device."""
        ...

    def mark(self) -> Any:
        """All that the caller has queued on the device until now."""
        ...

    def copy(self, pairs: Sequence[Pair], after: Any) -> Any:
        """Queue copies that begin when the mark `after` is reached; the mark of their end."""
        ...

    def wait(self, mark: Any) -> None:
        """What the caller queues from now on comes after the mark."""
        ...


class Ring:
    """Who has which place, and what must be over before what.

    Args:
        copies: of each layer that travels, from the host to its place: layer i has place i % 2.
    """

    def __init__(self, copier: Copier, copies: Sequence[Sequence[Pair]]):
        self.copier, self.copies = copier, copies
        self.held: list[int | None] = [None] * PLACES
        self.copied: list[Any] = [None] * PLACES

    def before(self, layer: int) -> None:
        """What is queued next may read the layer's weights."""
        place = layer % PLACES
        if self.held[place] != layer:  # the first pass, or one that did not run to its end
            self._bring(layer)
        self.copier.wait(self.copied[place])

    def after(self, layer: int) -> None:
        """Nothing that is queued from now on reads them in this pass: the next layer of this place may come."""
        following = layer + PLACES
        self._bring(following if following < len(self.copies) else layer % PLACES)

    def _bring(self, layer: int) -> None:
        place = layer % PLACES
        if self.held[place] == layer:
            return
        self.held[place] = layer
        self.copied[place] = self.copier.copy(self.copies[layer], after=self.copier.mark())


class _Part(NamedTuple):
    """A tensor of a layer, and how its owner is given another."""

    owner: Any
    name: str
    tensor: Tensor

    def become(self, view: Tensor) -> None:
        if isinstance(self.owner, nn.Module):
            set_parameter(self.owner, self.name, view)
        else:
            setattr(self.owner, self.name, view)


def linears(layer: nn.Module) -> list[Linear]:
    return [module for module in layer.modules() if isinstance(module, Linear)]


def parts_of(layer: nn.Module) -> list[_Part]:
    """Tensors of its linears, in whatever form."""
    found = []
    for linear in linears(layer):
        found += [_Part(linear, name, p.data) for name, p in linear.named_parameters() if not p.is_meta]  # fmt: skip
        if isinstance(linear.quant_method, PreparedLinearMethod):
            weight = linear.quant_method.weight
            found += [_Part(weight, n, t) for n, t in vars(weight).items() if isinstance(t, Tensor)]
    return found


class Offload:
    """What `cpu_offload_gb` asks for: relieves the device of at least so many bytes, if the model's layers have them.

    Args:
        wanted: bytes.
    """

    def __init__(self, copier: Copier, wanted: int):
        self.copier, self.wanted = copier, wanted
        self.chosen: list[nn.Module] = []

    def choose(self, layers: Sequence[nn.Module], shrink: float = 1.0) -> set[nn.Module]:
        """Of a model that has no weights yet: the layers that will travel; their linears, to be filled on the host.

        Two layers more than asked for, since two places stay on the device.

        Args:
            shrink: what a weight takes once it is loaded, as a share of what it takes by its shape.
        """
        size = max(shrink * sum(p.numel() * p.element_size() for m in linears(layer) for p in m.parameters()) for layer in layers)  # fmt: skip
        count = min(len(layers), -int(-self.wanted // size) + PLACES)
        self.chosen = [layers[index * len(layers) // count] for index in range(count)]
        return {linear for layer in self.chosen for linear in linears(layer)}

    def take(self) -> None:
        """The weights are there, on the host: from now on they travel."""
        packed = [_Packed(self.copier, parts_of(layer)) for layer in self.chosen]
        room = max(each.size for each in packed)
        places = [self.copier.device(room) for _ in range(min(PLACES, len(packed)))]
        ring = Ring(self.copier, [p.laid_in(places[i % PLACES]) for i, p in enumerate(packed)])
        for index, layer in enumerate(self.chosen):
            layer.register_forward_pre_hook(lambda module, args, i=index: ring.before(i))
            layer.register_forward_hook(lambda module, args, out, i=index: ring.after(i))
        total = sum(each.size for each in packed)
        self.chosen = []
        log.info(
            "cpu_offload_gb: %d layers (%.2f GiB) stay in the host's memory, two places of %.2f GiB on the device;"
            " steps are not recorded",
            len(packed), total / GIB, room / GIB,
        )  # fmt: skip


class _Packed:
    """A layer's tensors in memory of the host, one after the other."""

    def __init__(self, copier: Copier, parts: Sequence[_Part]):
        self.parts: list[tuple[int, _Part]] = []
        self.size = 0
        for part in parts:
            self.parts.append((self.size, part))
            self.size += -(-part.tensor.nbytes // ALIGNED) * ALIGNED
        sizes = [min(CHUNK, self.size - at) for at in range(0, self.size, CHUNK)]
        self.chunks = [copier.host(size) for size in sizes]
        for index, (at, part) in enumerate(self.parts):
            self._write(at, part.tensor.contiguous().flatten().view(torch.uint8))
            # Only its shape is wanted from now on: what held it is let go, one tensor after the other.
            part.become(part.tensor.to("meta"))
            self.parts[index] = at, part._replace(tensor=part.tensor.to("meta"))

    def _write(self, at: int, source: Tensor) -> None:
        while len(source):
            chunk = self.chunks[at // CHUNK]
            start = at % CHUNK
            piece = source[: len(chunk) - start]
            chunk[start : start + len(piece)].copy_(piece)
            at, source = at + len(piece), source[len(piece) :]

    def laid_in(self, place: Tensor) -> list[Pair]:
        """The tensors become views of a place; the copies that fill it."""
        for at, part in self.parts:
            like = part.tensor
            part.become(place[at : at + like.nbytes].view(like.dtype).view(like.shape))
        starts = range(0, self.size, CHUNK)
        return [
            (place[at : at + len(chunk)], chunk)
            for at, chunk in zip(starts, self.chunks, strict=True)
        ]
