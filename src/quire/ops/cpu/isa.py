"""Which instruction sets this machine has, and which build of the kernels it can run.

Knows /proc/cpuinfo and compiler flags. Asks the machine that runs, never the one that built.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

_BASE = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bf16",
    "-mavx512vnni",
    "-mfma",
)
_WORDS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma")


@dataclass(frozen=True, slots=True)
class Isa:
    """One way to build the kernels: what the CPU must say, and what the compiler is told."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


ISAS: tuple[Isa, ...] = (
    Isa(
        "amx",
        frozenset((*_WORDS, "amx_tile", "amx_bf16", "amx_int8")),
        (*_BASE, "-DQUIRE_AMX", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    Isa("avx512bf16", frozenset(_WORDS), _BASE),
)
"""Best first."""


@functools.cache
def words() -> frozenset[str]:
    """What the CPU says that it can do, in the Linux kernel's words; empty where that cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def usable() -> list[Isa]:
    """The builds that this machine can run, best first."""
    return [isa for isa in ISAS if isa.needs <= words()]
