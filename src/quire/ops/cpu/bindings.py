"""ctypes bindings of the CPU kernels: one library, loaded once.

Knows argument types. Does not know layers. It imports torch before it loads the library, so that both share torch's
OpenMP runtime: two runtimes would compete for the same cores.

Functions take tensors as addresses: the caller ensures dtype, layout and lifetime.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from quire import env
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.ops.cpu import build, isa

log = get_logger(__name__)

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, tuple[type, ...]] = {
    "linear": (_P, _L, _P, _P, _P, _L, _L, _L, _L, _I),
    "pack": (_P, _P, _L, _L, _L, _I),
    "linear_int8": (_P, _L, _P, _P, _P, _P, _P, _L, _L, _L, _L, _I),
    "linear_int4": (_P, _L, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _I),
    "quantize_rows": (_P, _L, _L, _P, _P),
    "quantize_groups": (_P, _L, _L, _L, _P, _P, _P),
    "unpack_rows": (_P, _P, _P, _L, _L),
    "pack_int8": (_P, _P, _L, _L, _L, _I),
    "attention": (
        _P,
        _L,
        _P,
        _P,
        _P,
        _P,
        _P,
        _L,
        _P,
        _L,
        _P,
        _P,
        _P,
        _L,
        _L,
        _L,
        _L,
        _L,
        _L,
        _L,
        _F,
        _F,
    ),
    "write_cache": (_P, _L, _P, _P, _P, _L, _L, _L, _L, _L, _I),
    "rms_norm": (_P, _L, _P, _P, _L, _L, _L, _L, _F, _I),
    "add_rms_norm": (_P, _P, _P, _L, _L, _F, _I),
    "rotate": (_P, _L, _P, _P, _P, _L, _L, _L, _L, _L),
    "silu_and_mul": (_P, _P, _L, _L),
    "masked_argmax": (_P, _L, _I, _P, _L, _L, _P, _P, _P),
    "mask_logits": (_P, _L, _P, _L, _L),
    "draw": (_P, _L, _P, _P, _P, _P, _L, _L, _P),
    "cut": (_P, _L, _P, _L, _L, _P, _P),
    "sample": (_P, _L, _I, _P, _P, _L, _L, _P, _P),
    "layer": (_P, _P, _P, _P, _I),
    "layers": (_P, _P, _L, _P, _P, _P, _F),
    "step": (_P, _P, _P, _L, _P, _P),
}
GIVES: dict[str, type] = {"step": _I}  # the others return nothing


class Kernels:
    """A loaded build: `kernels.linear(...)` and so on, with arguments as in SIGNATURES."""

    linear: Callable[..., None]
    pack: Callable[..., None]
    linear_int8: Callable[..., None]
    linear_int4: Callable[..., None]
    quantize_rows: Callable[..., None]
    quantize_groups: Callable[..., None]
    unpack_rows: Callable[..., None]
    pack_int8: Callable[..., None]
    attention: Callable[..., None]
    write_cache: Callable[..., None]
    rms_norm: Callable[..., None]
    add_rms_norm: Callable[..., None]
    rotate: Callable[..., None]
    silu_and_mul: Callable[..., None]
    masked_argmax: Callable[..., None]
    mask_logits: Callable[..., None]
    draw: Callable[..., None]
    cut: Callable[..., None]
    sample: Callable[..., None]
    layer: Callable[..., None]
    layers: Callable[..., None]
    step: Callable[..., int]
    threads: Callable[[], int]

    def __init__(self, which: isa.Isa):
        self.isa = which
        torch.get_num_threads()  # start torch's OpenMP runtime before the library resolves its own
        path = build.library(which)
        library = ctypes.CDLL(str(path))
        build.loaded(path)
        if library.quire_init():
            raise build.Missing(f"the operating system gives no {which.name} to this process")
        for name, types in SIGNATURES.items():
            function = getattr(library, f"quire_{name}")
            function.argtypes, function.restype = types, GIVES.get(name)
            setattr(self, name, function)
        self.threads = library.quire_threads


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
    wanted = str(env.get("CPU_ISA"))
    if wanted == "none":
        return None
    usable = [each.name for each in isa.usable()]
    _check(wanted, usable)
    reasons: dict[str, list[str]] = {}  # why -> builds
    failures: list[str] = []
    for name in usable:
        if wanted not in ("auto", name):
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
                    "the kernels have threads of their own, which compete with torch's for the cores: was it clang that compiled"
                    " them? Its OpenMP is another one; CXX=g++ and another QUIRE_CACHE_ROOT make new ones"
                )
            if failures:
                log.warning(
                    "the kernels for %s run, as others failed: %s", name, "; ".join(failures)
                )
            return found
    log.warning(
        "no native CPU kernels (%s): linears and attention run in plain torch, slower",
        "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items()),
    )
    return None


def shares_threads(threads: Callable[[], int]) -> bool:
    """Whether `threads()` follows torch's number of threads when that changes."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        return threads() == before + 1
    finally:
        torch.set_num_threads(before)


def _check(wanted: str, usable: list[str]) -> None:
    if wanted != "auto" and wanted not in usable:
        known = any(each.name == wanted for each in isa.ISAS)
        what = "this CPU cannot run it" if known else "there is no such build"
        raise ConfigError(f"QUIRE_CPU_ISA={wanted}: {what}; choose auto, {', '.join(usable)}, or none for plain torch")  # fmt: skip
