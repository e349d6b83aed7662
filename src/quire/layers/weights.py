"""A layer knows the checkpoint names of its own tensors and where in its parameters they go.

Knows names, shapes and parts. Does not know files or models: `models/load.py` brings (name, tensor) pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.errors import ConfigError


class Slot(NamedTuple):
    """Where one checkpoint tensor goes: a whole parameter, or `length` of dimension `dim` from `start`."""

    layer: nn.Module
    name: str
    dim: int | None = None
    start: int = 0
    length: int = 0

    def shape(self) -> tuple[int, ...]:
        shape = list(self.layer.get_parameter(self.name).shape)
        if self.dim is not None:
            shape[self.dim] = self.length
        return tuple(shape)

    def fill(self, tensor: Tensor, device: torch.device, called: str) -> None:
        """Take the tensor. A whole one in the right dtype becomes the parameter itself: no copy is made.

        Raises:
            ConfigError: it has another shape; `called` is its name in the checkpoint.
        """
        if tuple(tensor.shape) != self.shape():
            raise ConfigError(
                f"weight {called} has shape {list(tensor.shape)}; config.json makes it {list(self.shape())}"
            )
        into = self.layer.get_parameter(self.name)
        if self.dim is None:
            made = tensor.to(device=device, dtype=into.dtype)
            set_parameter(self.layer, self.name, made)
            return
        if into.is_meta:
            set_parameter(self.layer, self.name, torch.empty_like(into, device=device))
            into = self.layer.get_parameter(self.name)
        into.data.narrow(self.dim, self.start, self.length).copy_(tensor)


def set_parameter(layer: nn.Module, name: str, tensor: Tensor) -> None:
    """Parameters here are never trained, and so may be integers."""
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class Layer(nn.Module):
    """A module with weights of its own."""

    def slots(self, path: str) -> dict[str, Slot]:
        """Checkpoint name -> slot, for a layer at `path` in the model. By default its parameters' own names."""
        return {
            f"{path}.{name}": Slot(self, name) for name, _ in self.named_parameters(recurse=False)
        }

    def new(self, name: str, *shape: int) -> None:
        """Register an empty parameter of the default dtype."""
        set_parameter(self, name, torch.empty(*shape))
