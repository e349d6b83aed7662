"""Weight slots: which checkpoint tensor fills which parameter, or which part of it.

Knows names, shapes and parts. Does not know files or models: `models/load.py` brings (name, tensor) pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.parallel.ranks import OutputSlice

EXPONENT = torch.float8_e8m0fnu
"""Powers of two, the scales of some fp8 checkpoints."""


class LayerWeight(Protocol):
    """What slots and layers read of a weight (`WeightRef`, layers/weights.py)."""

    @property
    def layer(self) -> nn.Module: ...

    @property
    def parts(self) -> Mapping[str, int]: ...

    def slots(self, path: str) -> dict[str, WeightSlot]: ...

    def parameters(self) -> dict[str, Tensor]: ...


class WeightSlot(NamedTuple):
    """The destination of one checkpoint tensor: a whole parameter, or `length` of dimension `dim` from `start`.

    `per_part`: the parameter has one entry per part of the layer. `optional`: the checkpoint may lack it. `ref`: the
    weight that the tensor belongs to. `shares`: of the checkpoint tensor, this rank has these parts of dimension `cut`, one after
    the other; none: all of it.
    """

    layer: nn.Module
    name: str
    dim: int | None = None
    start: int = 0
    length: int = 0
    per_part: bool = False
    optional: bool = False
    ref: LayerWeight | None = None
    shares: tuple[OutputSlice, ...] = ()
    cut: int = 0

    @property
    def is_alternative(self) -> bool:
        """Whether other slots fill the same parameter part by part."""
        return self.dim is None and self.ref is not None and bool(self.ref.parts)

    def targets(self) -> tuple[WeightSlot, ...]:
        """The slots that one checkpoint tensor fills."""
        return (self,)

    def own_shape(self) -> tuple[int, ...]:
        """Of the destination."""
        shape = list(self.layer.get_parameter(self.name).shape)
        if self.dim is not None:
            shape[self.dim] = self.length
        return tuple(shape)

    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint tensor."""
        shape = list(self.own_shape())
        if self.shares:
            shape[self.cut] = sum(share.total for share in self.shares)
        return tuple(shape)

    def fill(self, tensor: Tensor, device: torch.device, called: str) -> None:
        """Store the tensor. A whole parameter in the right dtype and place takes it without a copy.

        On the CPU, the layer's `join` copies parts, and converts tensors of a layer that `may_defer`. Until then the
        tensor usually is a view of a mapped file: copies of all weights at once would double the memory of the model.

        Raises:
            ConfigError: the tensor (`called` in the checkpoint) has another shape, or is quantized where config.json
                says it is not, or the reverse.
        """
        tensor = own_part(self._in_shape(tensor, called), self.shares, self.cut)
        into = self.layer.get_parameter(self.name)
        if tensor.dtype != into.dtype and not (_is_plain(tensor) and _is_plain(into)):
            raise ConfigError(
                f"weight {called} is stored as {_name(tensor)}, but config.json requires {_name(into)}"
            )
        layer, is_part, converts = self.layer, self.dim is not None, tensor.dtype != into.dtype
        here = device.type == "cpu"
        if here and isinstance(layer, Layer) and (is_part or (converts and layer.may_defer)):
            layer.deferred.setdefault(self.name, []).append((self, tensor))
        else:
            self.put(tensor, device)

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Set the parameter, or copy the tensor into its part of it."""
        into = self.layer.get_parameter(self.name)
        if self.dim is None:
            set_parameter(self.layer, self.name, tensor.to(device=device, dtype=into.dtype))
            return
        if (
            into.is_meta
        ):  # (empty_like of a tensor on "meta" imports torch's decompositions, for a second)
            empty = torch.empty(into.shape, dtype=into.dtype, device=device)
            set_parameter(self.layer, self.name, empty)
            into = self.layer.get_parameter(self.name)
        into.data.narrow(self.dim, self.start, self.length).copy_(tensor)

    def _in_shape(self, tensor: Tensor, called: str) -> Tensor:
        """Allow missing or extra dimensions of length 1, and one per-part tensor that is shared by all parts."""
        want = self.shape()
        if tuple(tensor.shape) == want:
            return tensor
        if _without_ones(tensor.shape) == _without_ones(want):
            return tensor.reshape(want)
        if (
            self.per_part
            and self.dim is None
            and _without_ones(tensor.shape) == _without_ones(want[1:])
        ):
            return tensor.reshape(want[1:]).expand(want)
        raise ConfigError(
            f"weight {called} has shape {list(tensor.shape)}, but config.json requires {list(want)}"
        )


def own_part(tensor: Tensor, shares: Sequence[OutputSlice], dim: int = 0) -> Tensor:
    """What this rank has of a checkpoint tensor: these parts of dimension `dim`, one after the other; none: all. A view, if it is
    one piece: then nothing else of the file is read."""
    if not shares:
        return tensor
    begin, pieces = 0, []
    for share in shares:
        pieces.append(tensor.narrow(dim, begin + share.start, share.length))
        begin += share.total
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


class StackedSlot:
    """The destination of one checkpoint tensor [E, ...] that holds one parameter of each of E weights.

    It fills each weight from a view, so that the weights exist once.

    Args:
        slots: of each weight, the slot of its whole parameter.
        transposed: the orientation of matrices where their shape does not show it: the checkpoint has [E, in, out].
        interleaved: outputs of the two halves of a parameter alternate in the checkpoint.
        is_alternative: other slots fill the same parameters part by part.
        numbers: of these weights among the `total` of the tensor; None: it has no others.
    """

    dim: int | None = None
    optional: bool = False

    def __init__(
        self,
        slots: Sequence[WeightSlot],
        *,
        transposed: bool = False,
        interleaved: bool = False,
        is_alternative: bool = False,
        numbers: Sequence[int] | None = None,
        total: int = 0,
    ):
        self.slots, self.interleaved, self.is_alternative = (
            tuple(slots),
            interleaved,
            is_alternative,
        )
        self.layer, self.name, self.ref = slots[0].layer, slots[0].name, slots[0].ref
        self.transposed = transposed and len(slots[0].shape()) == 2
        self.numbers, self.total = numbers or range(len(slots)), total or len(slots)

    def targets(self) -> tuple[WeightSlot, ...]:
        """As of a `WeightSlot`."""
        return self.slots

    def shape(self) -> tuple[int, ...]:
        """The shape in checkpoints of the usual orientation."""
        one = self.slots[0].shape()
        return (self.total, *(one[::-1] if self.transposed else one))

    def fill(self, tensor: Tensor, device: torch.device, called: str) -> None:
        """Fill all weights; see `WeightSlot.fill`."""
        want, found = self.shape(), tuple(tensor.shape)
        usual = found == want
        if not usual and not (len(want) == 3 and found == (want[0], want[2], want[1])):
            raise ConfigError(
                f"weight {called} has shape {list(found)}, but config.json requires {list(want)}"
            )
        turned = self.transposed is usual and len(want) == 3
        for number, slot in zip(self.numbers, self.slots, strict=True):
            one = tensor[number].T if turned else tensor[number]
            if not self.interleaved and not turned:
                slot.fill(one, device, called)
                continue
            parts = (one[::2], one[1::2]) if self.interleaved else (one,)
            length = slot.own_shape()[0] // len(parts)
            for half, part in enumerate(parts):  # a copy, which a CPU defers
                shares = slot.shares[half : half + 1] if self.interleaved else slot.shares
                slot._replace(dim=0, start=half * length, length=length, shares=shares).fill(
                    part, device, called
                )


class UnreadSlot:
    """The destination of a checkpoint tensor that this rank does not need: nothing of it is read."""

    dim: int | None = None
    optional = is_alternative = True
    ref: LayerWeight | None = None
    name = ""

    def __init__(self, layer: nn.Module):
        self.layer = layer

    def targets(self) -> tuple[WeightSlot, ...]:
        """None."""
        return ()

    def shape(self) -> tuple[int, ...]:
        """Unknown."""
        return ()

    def fill(self, tensor: Tensor, device: torch.device, called: str) -> None:
        """Nothing."""


Slot = WeightSlot | StackedSlot | UnreadSlot


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [length for length in shape if length != 1]


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a float that converts to other floats; 8-bit floats, but powers of two, have no meaning without their
    scales."""
    return tensor.is_floating_point() and (tensor.itemsize > 1 or tensor.dtype == EXPONENT)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def set_parameter(layer: nn.Module, name: str, tensor: Tensor) -> None:
    """Register the tensor as a parameter without gradient, so that it may hold integers."""
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class Layer(nn.Module):
    """A module with tensors of its own."""

    may_defer = False  # whether conversion may wait for `join`: no code reads the parameter before
    random_mean = 0.0
    """Mean of the random values that replace a checkpoint (`models/dummy_weights.py`)."""
    is_called = True
    """Whether models call the layer itself, so that hooks on it run; of some layers they call other methods."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: dict[str, list[tuple[WeightSlot, Tensor]]] = {}  # what `join` will store
        self.own_shares: dict[str, Sequence[OutputSlice]] = {}
        """Of parameters that no weight has: what this rank has of them; others: all."""

    def weights(self) -> Iterable[LayerWeight]:
        """The weights that this layer multiplies by."""
        return ()

    def join(self, names: Iterable[str] | None = None) -> None:
        """Store the deferred tensors in the parameters; of these names only, if given."""
        for name in list(self.deferred) if names is None else names:
            for slot, tensor in self.deferred.pop(name, ()):
                slot.put(tensor, torch.device("cpu"))

    def slots(self, path: str) -> dict[str, Slot]:
        """Checkpoint name -> slot, for a layer at `path` in the model: the slots of its weights, and of its other
        parameters."""
        own_weights = [ref for ref in self.weights() if ref.layer is self]
        found: dict[str, Slot] = {}
        for ref in own_weights:
            found.update(ref.slots(path))
        weight_names = {name for ref in own_weights for name in ref.parameters()}
        for name, _ in self.named_parameters(recurse=False):
            if name not in weight_names:
                shares = tuple(self.own_shares.get(name, ()))
                found[f"{path}.{name}"] = WeightSlot(self, name, shares=shares)
        return found

    def new(self, name: str, *shape: int) -> None:
        """Register an empty parameter of the default dtype."""
        set_parameter(self, name, torch.empty(*shape))


def named_layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, Layer]]:
    """Each layer, with its path in checkpoints.

    A module's `checkpoint_names` (attribute of a child -> path in checkpoints, "" to leave it out) replaces attributes.
    """
    if isinstance(module, Layer):
        yield path, module
    renamed: Mapping[str, str] = getattr(module, "checkpoint_names", {})
    for name, child in module.named_children():
        yield from named_layers(child, ".".join(filter(None, (path, renamed.get(name, name)))))


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """Checkpoint name -> slot, for all layers of the model."""
    found: dict[str, Slot] = {}
    for path, layer in named_layers(model):
        found.update(layer.slots(path))
    return found
