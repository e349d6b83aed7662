"""Compile the kernels: when the package is installed, or else once, into the cache directory, where they first run.

Knows sources, flags and files. Does not know what the kernels do, and imports nothing but the standard library:
`setup.py` uses it too. A build is named by a hash of its sources and flags, so a new version never meets an old library.
One of the cache ends with a hash of itself: the linker maps a file that was cut short, and the process dies where it reads it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire import env
from quire.logging import get_logger
from quire.ops.cpu.isa import Isa

log = get_logger(__name__)

SOURCES = Path(__file__).parent / "kernels"
INSTALLED = Path(__file__).parent / "built"
"""Builds that came with the package."""
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=off",
)
PATIENCE_S = 600  # a file takes 3 s alone; a machine may be slow, and busy, and frozen for a while
SEAL = 32  # bytes
PRIVATE = "quire-kernels-"
"""Of a folder in the temporary directory, with a build for one process."""


class CannotBuild(Exception):
    """No compiler, or it failed; the message says which."""


class Unsafe(Exception):
    """Another user may have put a library into the cache."""


class Missing(CannotBuild):
    """This machine lacks something that it takes; our code is not to blame."""


def compiler() -> str:
    """Raises Missing: there is none."""
    named = env.outer("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return found
    raise Missing("there is no C++ compiler (g++ or clang++)")


Sources = dict[str, bytes]
"""By name. Read once: an upgrade may write them anew while they are compiled."""


def sources() -> Sources:
    paths = sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))
    return {path.name: path.read_bytes() for path in paths}


def file_name(isa: Isa, of: Sources | None = None) -> str:
    """What this build's library is called: changes when anything does that it is made of."""
    digest = hashlib.sha256(repr((FLAGS, isa.flags, platform.machine())).encode())
    for text in (sources() if of is None else of).values():
        digest.update(text)
    return f"{isa.name}-{digest.hexdigest()[:16]}.so"


def library(isa: Isa) -> Path:
    """The shared library of this build: the one that came with the package, else that of the cache, made if need be.

    Raises:
        CannotBuild: no compiler, or it failed.
    """
    name = file_name(isa)
    if (INSTALLED / name).exists():
        return INSTALLED / name
    root = Path(str(env.get("CACHE_ROOT"))).expanduser().absolute() / "kernels"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if root.stat().st_uid == os.geteuid():
            root.chmod(0o700)
        check_owner(root)
        if is_ours(root / name) and is_whole(root / name):
            return root / name
        made = make(isa, root)
    except Unsafe as why:
        log.warning(
            "%s: the CPU kernels are compiled for this process alone, at each start; set QUIRE_CACHE_ROOT to a"
            " folder of this user", why,
        )  # fmt: skip
        return make(isa, Path(tempfile.mkdtemp(prefix=PRIVATE)))
    except OSError as why:
        raise CannotBuild(f"{root} cannot be written ({why}); set QUIRE_CACHE_ROOT") from None
    log.info("compiled the CPU kernels for %s into %s", isa.name, made)
    return made


def loaded(path: Path) -> None:
    """After the linker has mapped the library: one that was made for this process alone needs no name any more."""
    if path.parent.name.startswith(PRIVATE):
        shutil.rmtree(path.parent, ignore_errors=True)


def is_ours(path: Path) -> bool:
    """Whether no other user but root can have written this file: a library is code."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISREG(found.st_mode) and _trusted(found) and not found.st_mode & others


def check_owner(folder: Path) -> None:
    """Raises Unsafe: another user could put a library into the folder, or another folder in its place.

    Each folder up to the root must belong to this user or to root, and only its owner may write there. The group of
    this process may too (umask 002), and everybody where the sticky bit keeps each user's entries (/tmp).
    """
    for place in {*_chain(folder), *_chain(folder.resolve())}:
        found = place.lstat()
        if not _trusted(found):
            raise Unsafe(f"{place} belongs to another user (uid {found.st_uid})")
        if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
            continue
        foreign = found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()
        if found.st_mode & stat.S_IWOTH or foreign:
            raise Unsafe(f"other users may write to {place}")


def _chain(folder: Path) -> list[Path]:
    return [folder, *folder.parents]


def _trusted(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid())


def is_whole(path: Path) -> bool:
    """Whether a library is there as it was made: a disk that was full or a machine that was switched off leaves others."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return data[-SEAL:] == hashlib.sha256(data[:-SEAL]).digest()


def make(isa: Isa, folder: Path) -> Path:
    """Compile a build into a folder that is there; the files one beside the other, on as many cores as there are.

    Raises:
        CannotBuild: no compiler, or it failed.
        OSError: the folder cannot be written.
    """
    command, texts = [compiler(), *FLAGS, *isa.flags], sources()
    target = folder / file_name(isa, texts)
    log.info("compiling the CPU kernels for %s, once: ten seconds of two cores", isa.name)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for name, text in texts.items():
            (Path(scratch) / name).write_bytes(text)
        objects = {one: one.with_suffix(".o") for one in Path(scratch).glob("*.cpp")}
        jobs = [[*command, "-c", str(source), "-o", str(to)] for source, to in objects.items()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        whole = Path(scratch) / target.name
        _run([*command, "-shared", *map(str, sorted(objects.values())), "-o", str(whole)])
        with whole.open("ab") as file:
            file.write(hashlib.sha256(whole.read_bytes()).digest())
        whole.chmod(0o755)  # under umask 0, the linker lets everybody write to it
        os.replace(whole, target)  # whole or not at all, whoever else builds
    return target


def _run(command: list[str]) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"the compiler took more than {PATIENCE_S} s") from None
    if run.returncode:
        raise CannotBuild(f"{command[0]} failed: {run.stderr.strip()[-800:]}")
