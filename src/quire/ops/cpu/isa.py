"""Instruction sets of this machine, and the builds of the kernels that it can run.

Knows /proc/cpuinfo and compiler flags. Checks the machine that runs Quire, not the one that built it.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

X86 = ("x86_64", "amd64")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Isa:
    """One build of the kernels: the CPU flags that it needs, and its compiler flags."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    machines: tuple[str, ...] = X86  # (): any


def _isas() -> tuple[Isa, ...]:
    wide = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
    builds: list[Isa] = []
    for name, words in {
        "amx": (*wide, "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
        "avx512bf16": (*wide, "avx512_bf16", "avx512_vnni"),
        "avx512vnni": (*wide, "avx512_vnni"),
        "avx512": wide,
        "avx2": ("avx2", "fma"),
    }.items():
        flags = (f"-m{_flag(word)}" for word in words)
        builds.append(Isa(name, frozenset(words), (*flags, *(["-DQUIRE_AMX"] * (name == "amx")))))
    return (*builds, Isa("portable", frozenset(), (), ()))


def _flag(word: str) -> str:
    """The Linux kernel's CPU flag -> the compiler's: avx512_bf16 -> avx512bf16, amx_tile -> amx-tile."""
    return word.replace("amx_", "amx-").replace("_", "")


ISAS: tuple[Isa, ...] = _isas()
"""Best first. The last runs everywhere: SSE2 on x86, NEON on ARM."""


@functools.cache
def words() -> frozenset[str]:
    """The CPU flags, by the Linux kernel's names; empty where /proc/cpuinfo cannot be read."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    first = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(first.split())


def of_this_architecture() -> list[Isa]:
    """The builds that this machine's architecture can compile, best first."""
    machine = platform.machine().lower()
    return [isa for isa in ISAS if not isa.machines or machine in isa.machines]


@functools.cache
def by_intel() -> bool:
    try:
        return "GenuineIntel" in CPUINFO.read_text()
    except OSError:
        return False


def usable() -> list[Isa]:
    """The builds that this machine can run, best first."""
    found = [isa for isa in of_this_architecture() if isa.needs <= words()]
    if by_intel():  # its bf16 instruction has half the speed of its fma (Sapphire Rapids: 106, 219 GFLOP/s per core)
        wide = ("amx", "avx512")
        found.sort(key=lambda isa: (not isa.name.startswith(wide), isa.name == "avx512bf16"))
    return found
