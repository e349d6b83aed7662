"""ctypes bindings of the CPU kernels: one library, loaded once.

Reads argument types from the kernels' headers. Does not know layers. It imports torch before it loads the library, so that the library asks
torch's OpenMP runtime for the number of threads. The threads are its own (`kernels/team.h`).

Functions take tensors as addresses: the caller ensures dtype, layout and lifetime.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from quire import env
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.ops.cpu import build, isa, structs

log = get_logger(__name__)

C_TYPES: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "long": ctypes.c_long,
    "float": ctypes.c_float,
}
DECLARATION = re.compile(r"EXPORT (\w+) quire_(\w+)\(([^)]*)\);")


COMPILING = "compiling the CPU kernels, once (about 10 s)"


def signatures() -> dict[str, tuple[Any, list[Any]]]:
    """By name: the types of the result and of the arguments, from the headers that the library is compiled from."""
    texts = (text.decode() for name, text in build.sources().items() if name.endswith(".h"))
    found = [match for text in texts for match in DECLARATION.findall(text)]
    return {
        name: (C_TYPES[gives], [_type_of(one) for one in takes.split(",") if one.strip()])
        for gives, name, takes in found
    }


def _type_of(declared: str) -> Any:
    return ctypes.c_void_p if "*" in declared else C_TYPES[declared.split()[0]]


class Kernels:
    """A loaded build: `kernels.linear(...)` calls `quire_linear`, and so on for every function of the headers.

    Raises:
        CannotBuild: the library cannot be loaded, or has structs of another layout.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def __init__(self, which: isa.Isa):
        self.isa = which
        torch.get_num_threads()  # start torch's OpenMP runtime before the library resolves its own
        path = build.library(which)
        library = ctypes.CDLL(str(path))
        build.loaded(path)
        if wrong := structs.differences(structs.layouts_of(library), structs.MIRRORS):
            raise build.CannotBuild(
                f"{path.name} has structs of another layout ({'; '.join(wrong)}): install Quire again"
            )
        if library.quire_init():
            raise build.Missing(
                f"the operating system does not allow {which.name} for this process"
            )
        for name, (gives, takes) in signatures().items():
            function = getattr(library, f"quire_{name}")
            function.argtypes, function.restype = takes, gives
            setattr(self, name, function)


@functools.cache
def load(name: str) -> Kernels:
    """Load a build by name. Raises CannotBuild."""
    which = next((each for each in isa.usable() if each.name == name), None)
    if which is None:
        raise build.Missing(f"this CPU cannot run {name}")
    return Kernels(which)


@functools.cache
def best() -> Kernels | None:
    """The best build that runs on this machine; None, with one warning, if there is none.

    Raises:
        ConfigError: QUIRE_CPU_ISA is unknown, or this CPU cannot run it.
    """
    requested = str(env.get("CPU_ISA"))
    if requested == "none":
        return None
    usable = [each.name for each in isa.usable()]
    _check(requested, usable)
    reasons: dict[str, list[str]] = {}  # why -> builds
    failures: list[str] = []
    for name in usable:
        if requested not in ("auto", name):
            continue
        try:
            found = load(name)
        except (build.CannotBuild, OSError, AttributeError) as why:
            reasons.setdefault(str(why), []).append(name)
            if not isinstance(why, build.Missing):
                failures.append(f"{name}: {why}")
        else:
            log.info("CPU kernels: %s", name)
            if not shares_threads(found.threads):
                log.warning(
                    "the kernels do not follow torch's number of threads, so both compete for the cores; this happens if"
                    " clang compiled them: set CXX=g++ and another QUIRE_CACHE_ROOT to compile them again"
                )
            if failures:
                log.warning(
                    "using the kernels for %s, because others failed: %s", name, "; ".join(failures)
                )
            return found
    log.warning(
        "no native CPU kernels, so linear layers and attention run in plain torch, which is slower (%s)",
        "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items()),
    )
    return None


def compile_missing(stage: Callable[[str], AbstractContextManager[None]]) -> None:
    """Load the best build within `stage(NAME)` if it must be compiled first, so that users see why a start takes long."""
    requested = str(env.get("CPU_ISA"))
    wanted = [each for each in isa.usable() if requested in ("auto", each.name)]
    if wanted and not build.exists(wanted[0]):
        with stage(COMPILING):
            best()


def shares_threads(threads: Callable[[], int]) -> bool:
    """Whether `threads()` follows torch's number of threads when that changes."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        return threads() == before + 1
    finally:
        torch.set_num_threads(before)


def _check(requested: str, usable: list[str]) -> None:
    if requested != "auto" and requested not in usable:
        known = any(each.name == requested for each in isa.ISAS)
        what = "this CPU cannot run it" if known else "unknown name"
        raise ConfigError(f"QUIRE_CPU_ISA={requested}: {what}; choose auto, {', '.join(usable)}, or none for plain torch")  # fmt: skip
