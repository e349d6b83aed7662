"""`vllm.platforms.current_platform`: facts about the device that Quire uses, under vLLM's names."""

from __future__ import annotations

import enum
import platform as host
from functools import cached_property
from typing import Any, NamedTuple

from quire.platforms.detect import PlatformFacts, cuda_device, facts

PlatformEnum = enum.Enum("PlatformEnum", "CUDA ROCM TPU XPU CPU OOT UNSPECIFIED")
CpuArchEnum = enum.Enum("CpuArchEnum", "X86 ARM POWERPC S390X RISCV OTHER UNKNOWN")
ARCHITECTURES = {
    "x86_64": "X86", "amd64": "X86", "aarch64": "ARM", "arm64": "ARM", "riscv64": "RISCV", "ppc64le": "POWERPC",
    "s390x": "S390X",
}  # fmt: skip


class DeviceCapability(NamedTuple):
    """Compute capability of a CUDA device."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        return self.major * 10 + self.minor


class PlatformInfo:
    """The device of this process. It is detected at first use."""

    @cached_property
    def _facts(self) -> PlatformFacts:
        return facts()

    @property
    def device_type(self) -> str:
        return self._facts.device

    device_name = device_type

    @property
    def dispatch_key(self) -> str:
        return self._facts.device.upper()

    @property
    def _enum(self) -> PlatformEnum:
        return PlatformEnum[self.dispatch_key]

    @property
    def supported_dtypes(self) -> list[Any]:
        """torch dtypes that the device multiplies natively, fastest first."""
        import torch

        return [getattr(torch, name) for name in self._facts.dtypes if hasattr(torch, name)]

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def _no(self) -> bool:
        return False

    is_rocm = is_tpu = is_xpu = is_out_of_tree = is_unspecified = is_zen_cpu = _no

    def is_sleep_mode_available(self) -> bool:
        return True

    def is_pin_memory_available(self) -> bool:
        return self.is_cuda()

    def get_device_name(self, device_id: int = 0) -> str:
        return self._facts.name

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes."""
        return self._facts.total_bytes

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """None: the device is not a CUDA device."""
        gpu = cuda_device() if self.is_cuda() else None
        return DeviceCapability(*gpu.capability) if gpu is not None else None

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device has at least this capability: (8, 9), or 89."""
        found = self.get_device_capability()
        wanted = divmod(capability, 10) if isinstance(capability, int) else capability
        return found is not None and tuple(found) >= tuple(wanted)

    def get_cpu_architecture(self) -> CpuArchEnum:
        return CpuArchEnum[ARCHITECTURES.get(host.machine().lower(), "OTHER")]

    def device_count(self) -> int:
        """Devices that Quire can use: one."""
        return 1


current_platform = PlatformInfo()
