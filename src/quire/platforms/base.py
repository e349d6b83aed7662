"""What a device must say of itself: tensors' place, memory, defaults, and what serves best on it.

Knows names. Does not know models, layers or caches. One class a kind of device (`cpu.py`); what can be found
out without torch is in `detect.py`, and a platform says the same.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol

import torch

PLATFORMS = {
    "cpu": "quire.platforms.cpu:CpuPlatform",
    "cuda": "quire.platforms.cuda:CudaPlatform",
}
"""Device, as `PlatformFacts` names it -> "module:Class"."""


class Memory(NamedTuple):
    """Bytes of the device, or of the cgroup around this process if that is less."""

    total: int
    available: int


class Platform(Protocol):
    """A device that models run on."""

    name: str
    """cpu, cuda, ..."""
    description: str
    """What the maker calls it."""
    device: torch.device
    attention: tuple[str, ...]
    """Names of `attention/base.py`, best first: the first that can serve a model does."""
    kernels: tuple[str, ...]
    """Kinds of op implementations, best first (`ops/dispatch.py`); the reference is always last."""
    default_depth: int
    default_block_size: int
    default_num_batched_tokens: int

    def prepare(self, weight_bytes: int) -> None:
        """Before a model of so many bytes is loaded."""
        ...

    def memory(self) -> Memory:
        """As it is now."""
        ...

    def plannable(self, forecast: Memory, tables: int) -> Memory:
        """What of a forecast, made without the device, a plan may count on; tables: bytes that rows' tables take."""
        ...

    def check_room(self, needed: int) -> None:
        """Everything is allocated. Raises NotEnoughMemory: so many bytes for a step are not left."""
        ...

    def recorder(self) -> Any:
        """What records steps (`worker/graphs.py`); None: this device cannot."""
        ...

    def copier(self) -> Any:
        """What copies from the host beside computing (`models/offload.py`); None: the host's memory is the device's."""
        ...

    def supports(self, dtype: str) -> bool:
        """Does it multiply this format with instructions of its own? Others work too, slower."""
        ...

    def preferred_dtype(self, checkpoint: str) -> str:
        """The format to compute in for weights stored as `checkpoint`."""
        ...


def platform_of(device: str) -> Platform:
    """The platform of a device of this machine.

    Raises:
        KeyError: there is none of that name.
    """
    module, _, attribute = PLATFORMS[device].partition(":")
    made: Platform = getattr(importlib.import_module(module), attribute)()
    return made
