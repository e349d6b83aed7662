"""Compile the CPU kernels: at installation of the package, or at first use into the cache directory.

Knows sources, flags and files. Does not know what the kernels do. Imports no torch, because `setup.py` uses it too.
The name of a build has a hash of its sources and flags, so a new version never loads an old library. A cached build
ends with a hash of itself: the linker would map a truncated file, and the process would die when it reads the rest.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from quire import env
from quire.logging import get_logger
from quire.ops.cpu.isa import Isa

log = get_logger(__name__)

SOURCES = Path(__file__).parent / "kernels"
INSTALLED = Path(__file__).parent / "built"
"""Builds from the installation of the package."""
FLAGS = tuple(
    "-O3 -std=c++17 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -ffp-contract=off".split()
)
PATIENCE_S = 600  # compiler timeout: a file takes 3 s on an idle machine, but a machine may be slow, busy or suspended
SEAL = 32  # bytes of the hash at the end
SCRATCH = "building-"  # prefix of the folder of a running build
KILLED_S = 3600  # a build in whose folder nothing changed for an hour was killed
PRIVATE = "quire-kernels-"  # prefix of the temporary folder of a build for one process


class CannotBuild(Exception):
    """The kernels cannot be built or loaded; the message says why."""


class Unsafe(Exception):
    """Another user may have put a library into the cache."""


class Missing(CannotBuild):
    """This machine lacks a compiler or an instruction set; Quire's sources are not the cause."""


def compiler() -> str:
    """Path of the C++ compiler. Raises Missing: there is none."""
    named = env.outer("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return found
    raise Missing(
        f"there is no C++ compiler ({named or 'g++ or clang++'}): install g++ (apt install g++, dnf install gcc-c++),"
        " or a wheel of Quire, which contains the kernels"
    )


Sources = dict[str, bytes]
"""File name -> content. Read once per build: an upgrade may replace the files during compilation."""


def sources() -> Sources:
    paths = sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))
    return {path.name: path.read_bytes() for path in paths}


def file_name(isa: Isa, of: Sources | None = None) -> str:
    """The library's file name, with a hash of its flags, sources and machine type."""
    digest = hashlib.sha256(repr((FLAGS, isa.flags, platform.machine())).encode())
    for text in (sources() if of is None else of).values():
        digest.update(text)
    return f"{isa.name}-{digest.hexdigest()[:16]}.so"


def cache_folder() -> Path:
    return Path(str(env.get("CACHE_ROOT"))).expanduser().absolute() / "kernels"


def exists(isa: Isa) -> bool:
    """Whether `library` finds this build compiled, unless it then rejects the file."""
    name = file_name(isa)
    return (INSTALLED / name).exists() or (cache_folder() / name).exists()


def library(isa: Isa) -> Path:
    """The shared library of this build: the installed one, else the one in the cache, compiled if it is not there.

    Raises:
        CannotBuild: no compiler, or it failed.
    """
    name = file_name(isa)
    if (INSTALLED / name).exists():
        return INSTALLED / name
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if root.stat().st_uid == os.geteuid():
            root.chmod(0o700)
        check_owner(root)
        if _is_cached(root / name):
            return root / name
        with _lock(root):
            if _is_cached(root / name):
                return root / name
            _remove_killed_builds(root)
            library = make(isa, root)
    except Unsafe as why:
        log.warning(
            "%s: the CPU kernels are compiled again at each start; set QUIRE_CACHE_ROOT to a folder of this user",
            why,
        )
        return make(isa, Path(tempfile.mkdtemp(prefix=PRIVATE)))
    except OSError as why:
        raise CannotBuild(f"{root} is not writable ({why}); set QUIRE_CACHE_ROOT") from None
    log.info("compiled the CPU kernels for %s into %s", isa.name, library)
    return library


def _is_cached(path: Path) -> bool:
    return is_ours(path) and is_whole(path)


def _remove_killed_builds(folder: Path) -> None:
    """Delete the folders of killed builds. A younger folder may belong to a running build that did not get the lock in time."""
    for left in folder.glob(f"{SCRATCH}*"):
        with suppress(OSError):  # its build ends now
            if time.time() - left.stat().st_mtime > KILLED_S:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Of processes that need the same build, one compiles it and the others wait, at most `PATIENCE_S` seconds."""
    end, locked = time.monotonic() + PATIENCE_S, os.open(folder, os.O_RDONLY)
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(locked)


def loaded(path: Path) -> None:
    """Delete a library that was built for this process alone, once the linker has mapped it."""
    if path.parent.name.startswith(PRIVATE):
        shutil.rmtree(path.parent, ignore_errors=True)


def is_ours(path: Path) -> bool:
    """Whether only this user or root can have written this file: a library is code."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISREG(found.st_mode) and _trusted(found) and not found.st_mode & others


def check_owner(folder: Path) -> None:
    """Raises Unsafe: another user could put a library into the folder, or replace the folder.

    Each folder up to the root must belong to this user or to root, and only its owner may write to it. Exceptions: this
    process's group may write (umask 002), and all users where the sticky bit protects entries (/tmp).
    """
    for place in {*_chain(folder), *_chain(folder.resolve())}:
        found = place.lstat()
        if not _trusted(found):
            raise Unsafe(f"{place} belongs to another user (uid {found.st_uid})")
        if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
            continue
        foreign = found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()
        if found.st_mode & stat.S_IWOTH or foreign:
            raise Unsafe(f"other users can write to {place}")


def _chain(folder: Path) -> list[Path]:
    return [folder, *folder.parents]


def _trusted(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid())


def is_whole(path: Path) -> bool:
    """Whether the library exists and is complete: a full disk or a power failure may have truncated it."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return data[-SEAL:] == hashlib.sha256(data[:-SEAL]).digest()


def make(isa: Isa, folder: Path) -> Path:
    """Compile a build into an existing folder, with all cores in parallel.

    Raises:
        CannotBuild: no compiler, or it failed.
        OSError: the folder cannot be written.
    """
    command, texts = [compiler(), *FLAGS, *isa.flags], sources()
    target = folder / file_name(isa, texts)
    log.info(
        "compiling the CPU kernels for %s once; this takes about half a minute on two cores",
        isa.name,
    )
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
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
        whole.chmod(0o755)  # under umask 0, the linker makes it writable for all users
        os.replace(whole, target)  # atomic, because other processes may build it too
    return target


def _run(command: list[str]) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"the compiler took more than {PATIENCE_S} s") from None
    if run.returncode:
        raise CannotBuild(f"{command[0]} failed: {run.stderr.strip()[-800:]}")
