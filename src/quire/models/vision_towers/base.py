"""What vision towers share: packed pictures, patches, and the names and sizes of tensors in checkpoints.

A tower is an encoder (`layers/encoder.py`) over patches, and a projector. The patches of all pictures of a pass are one after the
other; a picture is a row of the batch, or several, if its tiles or frames do not see each other. So a picture's bits do not
depend on the others, as those of a text of an embedding model.

Shape suffixes: T patches of a pass, D features of the tower, I values of a patch, N rows of an item, F features of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.errors import ConfigError
from quire.layers.encoder import EncoderStack
from quire.layers.linear import Linear
from quire.layers.lora import Place, places_of
from quire.layers.norm import Norm
from quire.layers.rotary import LayerRotaries
from quire.protocol.media import TowerInput
from quire.protocol.tensor_data import TensorData

STEP = 32
"""Inputs that the CPU kernels multiply at once: weights of other sizes end with zeros."""


class LayerSizes(NamedTuple):
    """What an encoder layer's parts read of a config."""

    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class NativeTower(nn.Module):
    """A vision tower and its projector.

    Attributes:
        stored: by name here, the shapes of weights in the checkpoint, as rows and columns.
        unread_layers: numbers of the layers that are left out, since nothing reads their states.
    """

    unread_layers = range(0)

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[str, torch.Size] = {}

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        """rows_NF of each item, in one pass.

        Raises:
            ValueError, RuntimeError, TypeError, KeyError: the tower cannot take the tensors of an item.
        """
        raise NotImplementedError

    def place(self) -> tuple[torch.device, torch.dtype]:
        """Where its weights are, and their dtype."""
        norm = next(one for one in self.modules() if isinstance(one, Norm))
        return norm.weight.device, norm.weight.dtype

    def own_tensor(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """A checkpoint's tensor, with its name here; None: it is not the tower's."""
        raise NotImplementedError

    def adapter_places(self) -> dict[str, Place]:
        """As of a language model. Not in tables of positions, which nothing looks up by number."""
        found = {}
        for name, place in places_of(self).items():
            if place.rows is not None:
                outs, ins = self.stored.get(name, (place.outs, place.target.num_in))
                is_less = (ins, outs) != (place.target.num_in, place.outs)
                found[name] = place._replace(stored=(ins, outs) if is_less else None)
        return found

    def adapter_name(self, module: str) -> str | None:
        """See `AdaptedEncoder` (layers/lora.py)."""
        found = self.own_tensor(f"{module}.weight", torch.empty(0, 0))
        name = "" if found is None else found[0].removesuffix(".weight")
        layer = re.search(r"\.layers\.([0-9]{1,6})\.", name)
        return None if layer is not None and int(layer[1]) in self.unread_layers else name


def grown(size: int) -> int:
    """The size that a dimension of weights has here: the kernels take multiples of STEP."""
    return -(-size // STEP) * STEP


def fitted(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A checkpoint's tensor as a tower has it: kernels of convolutions as rows, and zeros at the end of sizes that have grown."""
    tensor = tensor.flatten(1) if tensor.dim() > 2 else tensor
    if tensor.dim() != len(shape):
        return tensor
    sizes = list(zip(tensor.shape, shape, strict=True))
    if any(new not in (old, grown(old)) for old, new in sizes):
        return tensor
    more = [new - old for old, new in sizes]
    return (
        F.pad(tensor, [end for extra in reversed(more) for end in (0, extra)])
        if any(more)
        else tensor
    )


class PatchEmbedding(Linear):
    """A convolution whose kernels do not overlap, as a product: the values of each patch times the weight of the convolution."""

    def __init__(self, values: int, size: int, *, bias: bool):
        super().__init__(values, size, bias=bias)

    def forward(self, patches_TI: Tensor) -> Tensor:
        """x_TD"""
        return super().forward(F.pad(patches_TI, (0, self.ref.num_in - patches_TI.shape[1])))


class Stack(EncoderStack):
    """Layers [first, end) of a tower, which run together; see `stacks_of`."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        final_norm: Norm | None,
        rope: LayerRope | None,
        names: tuple[str, str],
    ):
        super().__init__()
        self.checkpoint_names = dict(zip(("layers", "final_norm"), names, strict=True))
        self.layers = Numbered(layers, first)
        self.final_norm = final_norm
        self.rotaries = None if rope is None else LayerRotaries(rope.head_dim, [rope.parameters] * len(layers))  # fmt: skip


class LayerRope(NamedTuple):
    """The rotary embedding of all layers."""

    head_dim: int
    parameters: Mapping[str, Any]


class Numbered(nn.ModuleList):
    """Layers that have larger numbers in checkpoints."""

    def __init__(self, layers: Sequence[nn.Module], first: int):
        super().__init__(layers)
        self.checkpoint_names = {str(i): str(first + i) for i in range(len(layers))}


class Stacks(nn.ModuleList):
    """The layers of a tower, cut where their states are wanted.

    Args:
        ends: the numbers of layers after which states are wanted, ascending; later layers are left out.
        layer: makes layer i. final_norm: after the last. names: of the list of layers, and of the last norm, in checkpoints.
    """

    def __init__(
        self,
        ends: Sequence[int],
        layer: Callable[[int], nn.Module],
        *,
        names: tuple[str, str],
        final_norm: Norm | None = None,
        rope: LayerRope | None = None,
    ):
        bounds = zip([0, *ends], ends, strict=False)
        super().__init__(
            Stack([layer(i) for i in range(first, end)], first, final_norm if end == ends[-1] else None, rope, names)
            for first, end in bounds
        )  # fmt: skip
        self.checkpoint_names = {str(i): "" for i in range(len(ends))}

    def run(self, x_TD: Tensor, positions: Tensor) -> list[Tensor]:
        """states_TD after each stack. It may overwrite x."""
        found = []
        stack: Any
        for stack in self:
            x_TD = stack.run(x_TD, positions)
            found.append(x_TD if len(self) == 1 else x_TD.clone())
        return found


class Perceptron(nn.Module):
    """down(act(up(x))), the form of most projectors.

    Args:
        sizes: of the input, in between, and of the rows.
        names: of up and down in checkpoints.
    """

    def __init__(
        self, sizes: tuple[int, int, int], names: tuple[str, str], *, act: str = "gelu", bias: bool = True
    ):  # fmt: skip
        super().__init__()
        self.checkpoint_names = dict(zip(("up", "down"), names, strict=True))
        self.up = Linear(sizes[0], sizes[1], bias=bias, after=act)
        self.down = Linear(sizes[1], sizes[2], bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """y_TF"""
        return self.down(self.up(x_TD))


def as_tensor(data: TensorData, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """A tensor of a message; floats become `dtype`."""
    copied = bytearray(data.data)  # torch wants memory that may be written
    tensor = torch.frombuffer(copied, dtype=getattr(torch, data.dtype)).view(data.shape)
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def first_of(tensors: Mapping[str, TensorData], *names: str) -> TensorData:
    """The first that there is. Raises KeyError: there is none."""
    return next((tensors[name] for name in names if name in tensors), None) or tensors[names[0]]


def feature_layers(config: Mapping[str, Any], default: int) -> list[int]:
    """The layers that `vision_feature_layer` of a wrapper's config names: one number or several. A config.json without the key means `default`."""
    chosen = config.get("vision_feature_layer", default)
    return list(chosen) if isinstance(chosen, list | tuple) else [chosen]


def stack_ends(outputs: Sequence[int], depth: int) -> tuple[list[int], list[int]]:
    """(`ends` of `Stacks`; for each of `outputs`, the number of the stack that has its states).

    `outputs`: n means the states after the first n layers; negative numbers count from the end of the `depth` layers, with -1 for all.

    Raises:
        ConfigError: the tower has fewer layers.
    """
    layers = [n if n >= 0 else depth + 1 + n for n in outputs]
    if not all(0 < n <= depth for n in layers):
        raise ConfigError(f"vision_feature_layer={list(outputs)} of config.json: the tower has {depth} layers")  # fmt: skip
    ends = sorted(set(layers))
    return ends, [ends.index(n) for n in layers]


def picture_size(item: TowerInput) -> tuple[int, int]:
    """(height, width) of the picture in pixels, without the padding that the processor added."""
    height, width = as_tensor(item.tensors["image_sizes"], "cpu", torch.float32).flatten().tolist()
    return int(height), int(width)


def side(size: Any) -> int:
    """Of a square, from a number or a list."""
    return int(size[0] if isinstance(size, list | tuple) else size)
