"""Detect the device, its dtypes, memory and defaults, without importing torch.

Knows /proc, cgroups and the CUDA driver's C interface. Does not know tensors. Each call of `facts()` reads free memory
again; the search for a CUDA device runs once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform as host
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from quire import env
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.plugins import platform_plugins

logger = get_logger(__name__)

GIB = 1 << 30
PROVEN = False
"""Whether the CUDA platform has run on a GPU (`make bench-gpu`). Until then Quire uses it only if QUIRE_DEVICE=cuda."""

ATTENTION = {
    "cpu": ("CPU_ATTN", "TORCH_SDPA"),
    "cuda": ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "TORCH_SDPA"),
}
"""Device -> its attention backends, fastest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformFacts:
    """All facts about a device that `config/resolve.py` needs."""

    device: str
    """cpu, cuda, or the name of a platform plugin."""
    name: str
    """The vendor's name of the device."""
    dtypes: tuple[str, ...]
    """Dtypes that it multiplies natively, fastest first."""
    block_size: int
    """Default for the tokens of a KV block."""
    num_batched_tokens: int
    """Default limit on the tokens of a step."""
    max_num_seqs: int
    """Default limit on the requests that run at once."""
    depth: int
    """Default number of steps in flight."""
    total_bytes: int
    """Upper bound of the memory of this process: the device's, or the smaller of machine and cgroup."""
    available_bytes: int
    """Memory of it that is free now; file cache that the kernel can reclaim counts as free."""

    def preferred_dtype(self, checkpoint: str) -> str:
        """The dtype to compute in for weights that the checkpoint stores as `checkpoint`, if the user sets none.

        bfloat16 stays where the device can compute it, because float16 lacks its range. float32 and float16 become the
        device's 16-bit dtype, as in other engines: half the memory traffic for the same text. On a CPU without 16-bit
        dtypes they become float32, but bfloat16 stays, because float32 would double the memory.
        """
        if self.device == "cuda":
            if checkpoint == "bfloat16":
                return "bfloat16" if "bfloat16" in self.dtypes else "float16"
            return "float16"
        if checkpoint == "bfloat16":
            return "bfloat16"
        if checkpoint == "float16" and "float16" in self.dtypes:
            return "float16"
        return "bfloat16" if "bfloat16" in self.dtypes else "float32"


def facts() -> PlatformFacts:
    """The facts of the device that this process uses.

    QUIRE_DEVICE=cpu, cuda or the name of a platform plugin forces one. A plugin's device has precedence.

    Raises:
        ConfigError: QUIRE_DEVICE names an unknown device, or one that this process cannot use; or plugins found several.
    """
    requested = str(env.get("DEVICE") or "auto")
    added = {} if requested in ("cpu", "cuda") else platform_plugins()
    if requested not in ("auto", "cpu", "cuda", *added):
        raise ConfigError(
            f"QUIRE_DEVICE={requested}: choose from {', '.join(('cpu', 'cuda', *added))}; unset it to detect the device."
        )
    if requested == "auto" and len(added) > 1:
        raise ConfigError(f"platform plugins found several devices: set QUIRE_DEVICE to one of {', '.join(added)}")  # fmt: skip
    for name, platform in added.items():
        if requested in ("auto", name):
            return replace(platform.facts(), device=name)
    gpu = cuda_device() if requested != "cpu" else None
    missing = cuda_missing() if gpu else "no CUDA driver, or no CUDA device for this process"
    if gpu and not missing and (PROVEN or requested == "cuda"):
        return _cuda_facts(gpu)
    if requested == "cuda":
        raise ConfigError(f"QUIRE_DEVICE=cuda, but {missing}.")
    if gpu:
        missing = missing or "CUDA support is experimental; set QUIRE_DEVICE=cuda to use it"
        logger.warning_once("not using %s: %s", gpu.name, missing)
    return cpu_facts()


def cpu_facts() -> PlatformFacts:
    total, available = memory()
    return PlatformFacts(
        device="cpu",
        name=cpu_name(),
        dtypes=cpu_dtypes(),
        block_size=64,
        num_batched_tokens=2048,
        max_num_seqs=256,
        depth=1,  # a second step in flight costs more than it hides: docs/decisions/0034
        total_bytes=total,
        available_bytes=available,
    )


def cuda_facts() -> PlatformFacts:
    """Raises ConfigError: the driver finds no CUDA device."""
    if (gpu := cuda_device()) is None:
        raise ConfigError("no CUDA driver, or no CUDA device for this process")
    return _cuda_facts(gpu)


def _cuda_facts(gpu: CudaDevice) -> PlatformFacts:
    new = gpu.capability >= (8, 0)
    short = ("float8_e4m3",) if gpu.capability >= (8, 9) else ()
    return PlatformFacts(
        device="cuda",
        name=gpu.name,
        dtypes=("bfloat16", "float16", *short) if new else ("float16",),
        block_size=16,
        num_batched_tokens=8192 if gpu.total >= 70 * GIB else 2048,
        max_num_seqs=256,
        depth=2,
        total_bytes=gpu.total,
        # The driver reports free memory only to a process with a context, so use the total.
        available_bytes=gpu.total,
    )


# CUDA


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """The first CUDA device that CUDA_VISIBLE_DEVICES allows."""

    name: str
    total: int
    """Bytes."""
    capability: tuple[int, int]


def cuda_missing() -> str:
    """Why this installation cannot use a CUDA device; empty: it can."""
    if importlib.util.find_spec("quire.platforms.cuda") is None:
        return "this version of Quire has the CPU platform only"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    if "+cpu" in version:
        return f"torch {version} was built without CUDA; install a CUDA build of it"
    return ""


@cache
def cuda_device() -> CudaDevice | None:
    """Query the driver; None if there is no driver, or no device for this process.

    The driver itself applies CUDA_VISIBLE_DEVICES. The query creates no context, so it allocates no GPU memory.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, handle = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    if driver.cuDeviceGet(ctypes.byref(handle), 0):
        return None
    name = ctypes.create_string_buffer(256)
    total = ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetName(name, 256, handle)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)  # compute capability, major
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)  # ... and minor
    return CudaDevice(name.value.decode(errors="replace"), total.value, (major.value, minor.value))


# CPU


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets, by the Linux kernel's names; empty without /proc/cpuinfo."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86, ARM
            return frozenset(value.split())
    return frozenset()


@cache
def cpu_name() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return host.processor() or host.machine()


def cpu_dtypes() -> tuple[str, ...]:
    """Dtypes with their own dot product instructions, fastest first; always float32."""
    flags = cpu_flags()
    found = []
    if flags & {"amx_bf16", "avx512_bf16", "bf16"}:
        found.append("bfloat16")
    if flags & {"amx_fp16", "avx512_fp16", "asimdhp"}:
        found.append("float16")
    return (*found, "float32")


# Memory


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, available) bytes of the machine, or of the tightest cgroup of this process if that is less.

    `root`: the directory with /proc and /sys, for tests.
    """
    total, available = _machine(root)
    for limit, used in _cgroups(root):
        if limit < total:
            total = limit
        available = min(available, max(limit - used, 0))
    return total, available


def _machine(root: Path) -> tuple[int, int]:
    values: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):
            values[key] = int(rest.split()[0]) * 1024
    if "MemTotal" in values:
        return values["MemTotal"], values.get("MemAvailable", values.get("MemFree", 0))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total // 2  # without /proc, free memory is unknown


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of each memory cgroup with a limit, from this process's up to the root."""
    names = {
        True: ("memory.max", "memory.current", ""),
        False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    }
    found = (_cgroup(folder, *names[new]) for folder, new in cgroup_folders(root, "memory"))
    return [one for one in found if one is not None]


def cgroup_folders(root: Path, controller: str) -> list[tuple[Path, bool]]:
    """Folders of this process's cgroups with this controller, up to the root, and whether each is of version 2."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if new := (number == "0" and not controllers):
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # In a container the path is often the host's: then only the root of the mount exists.
        inner = Path(path.lstrip("/"))
        found += [(folder, new) for folder in (base / inner, *(base / p for p in inner.parents))]
    return found


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU quota of the tightest cgroup of this process, in CPUs; None: no limit."""
    found = []
    for folder, new in cgroup_folders(root, "cpu"):
        if new:
            limit, _, period = _read(folder / "cpu.max").strip().partition(" ")
        else:
            limit = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if limit.isdigit() and period.isdigit() and int(period):  # else "max", -1, or no file
            found.append(int(limit) / int(period))
    return min(found, default=None)


def _cgroup(folder: Path, limit_name: str, used_name: str, prefix: str) -> tuple[int, int] | None:
    limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
    if not limit.isdigit() or not used.isdigit():
        return None  # no file, or "max": no limit
    stat = dict(
        line.split()[:2] for line in _read(folder / "memory.stat").splitlines() if " " in line
    )
    # The kernel reclaims file cache: count the inactive part and half of the active, as in MemAvailable.
    cold, hot = (int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return int(limit), max(int(used) - cold - hot // 2, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
