"""Compile the kernels once, into the cache directory, if there is a compiler.

Knows sources, flags and files. Does not know what the kernels do. A build is named by a hash of all that went
into it, so a new version, another compiler or another instruction set never meets an old library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from quire import env
from quire.logging import get_logger
from quire.ops.cpu.isa import Isa

log = get_logger(__name__)

SOURCES = Path(__file__).parent / "kernels"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=off",
)
PATIENCE_S = 120


class CannotBuild(Exception):
    """No compiler, or it failed; the message says which."""


def compiler() -> str:
    """Raises CannotBuild: there is none."""
    named = env.outer("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return found
    raise CannotBuild("there is no C++ compiler (g++ or clang++)")


def library(isa: Isa) -> Path:
    """The shared library of this build, made if it is not there yet.

    Raises:
        CannotBuild: no compiler, or it failed.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256(repr((FLAGS, isa.flags)).encode())
    for path in (*sources, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    root = Path(str(env.get("CACHE_ROOT"))).expanduser() / "kernels"
    target = root / f"{isa.name}-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        _compile(isa, sources, target)
    except OSError as why:
        raise CannotBuild(f"{root} cannot be written ({why}); set QUIRE_CACHE_ROOT") from None
    return target


def _compile(isa: Isa, sources: list[Path], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler(), *FLAGS, *isa.flags, *map(str, sources), "-o", str(made)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise CannotBuild(f"the compiler took more than {PATIENCE_S} s") from None
        if run.returncode:
            raise CannotBuild(f"{command[0]} failed: {run.stderr.strip()[-800:]}")
        os.replace(made, target)  # whole or not at all, whoever else builds
    log.info("compiled the CPU kernels for %s into %s", isa.name, target)
