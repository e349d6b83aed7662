"""The platform interface: torch device, memory, defaults and preferred implementations of one kind of device.

Knows names. Does not know models, layers or caches. Each kind of device has one class (`cpu.py`); `detect.py` finds
what needs no torch, and platforms use its facts.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol

import torch

from quire.plugins import platform_plugins

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
    """The vendor's name of the device."""
    device: torch.device
    attention: tuple[str, ...]
    """Backend names (`attention/base.py`), best first: the first that can serve a model is used."""
    kernels: tuple[str, ...]
    """Kinds of op implementations, best first (`ops/dispatch.py`); the reference is always last."""
    default_depth: int
    default_block_size: int
    default_num_batched_tokens: int

    def prepare(self, weight_bytes: int) -> None:
        """Called before a model of this many bytes is loaded."""
        ...

    def memory(self) -> Memory:
        """Current memory of the device."""
        ...

    def plannable(self, forecast: Memory, tables: int) -> Memory:
        """The part of `forecast` that a memory plan may use; tables: bytes of the per-row tables.

        The forecast was made without the device.
        """
        ...

    def check_room(self, needed: int) -> None:
        """Called when everything is allocated. Raises NotEnoughMemory: fewer bytes are free than a step needs."""
        ...

    def graph_capturer(self) -> Any:
        """The object that captures steps as graphs (`worker/graphs.py`); None: the device cannot."""
        ...

    def copier(self) -> Any:
        """Copies from the host during computation (`models/offload.py`); None: the device uses host memory."""
        ...

    def supports(self, dtype: str) -> bool:
        """Whether the device has instructions for this dtype. Other dtypes work too, more slowly."""
        ...

    def preferred_dtype(self, checkpoint: str) -> str:
        """The dtype to compute in for weights that the checkpoint stores as `checkpoint`."""
        ...


def platform_of(device: str) -> Platform:
    """The platform of a device of this machine.

    Raises:
        KeyError: no platform has that name.
    """
    if device in PLATFORMS:
        module, _, attribute = PLATFORMS[device].partition(":")
        kind = getattr(importlib.import_module(module), attribute)
    else:
        kind = platform_plugins()[device]
    platform: Platform = kind()
    return platform
