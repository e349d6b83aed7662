"""Which cores this process computes on: QUIRE_CPU_OMP_THREADS_BIND and QUIRE_CPU_NUM_OF_RESERVED_CPU.

Set before torch is imported, since its threads take the affinity of the one that makes them, and their number from it.
Knows the kernel's affinity. Does not know torch.
"""

from __future__ import annotations

import os

from quire import env
from quire.errors import ConfigError
from quire.logging import get_logger

logger = get_logger(__name__)


def bind_to_cores() -> list[int]:
    """Keep this process on the cores that were asked for; which, or [] if nothing was asked for.

    Raises:
        ConfigError: a list that cannot be read, or with a core that this process may not use.
    """
    if not hasattr(os, "sched_setaffinity"):
        return []  # only Linux binds
    cores = chosen_cores(
        str(env.get("CPU_OMP_THREADS_BIND")),
        int(env.get("CPU_NUM_OF_RESERVED_CPU")),
        sorted(os.sched_getaffinity(0)),
    )
    if cores:
        os.sched_setaffinity(0, cores)
        logger.info("computing on cores %s", ",".join(map(str, cores)))
    return cores


def chosen_cores(bind: str, reserved: int, allowed: list[int]) -> list[int]:
    """The cores to bind to, or [] to leave that to the kernel.

    Args:
        bind: `auto` and `nobind` leave it to the kernel, unless cores are reserved (auto); or a list `0-3,8`. Of
            lists for several workers, `0-3|4-7`, the first is ours.
        reserved: how many of the allowed cores not to compute on: the first ones, where interrupts are served.
        allowed: cores that this process may use.
    """
    name = "QUIRE_CPU_OMP_THREADS_BIND"
    if bind == "nobind":
        return []
    if bind != "auto":
        wanted = _listed(bind.partition("|")[0], name)
        if missing := sorted(set(wanted) - set(allowed)):
            raise ConfigError(
                f"{name}={bind}: this process may not use core {missing[0]}; it may use"
                f" {','.join(map(str, allowed))}"
            )
        return wanted
    if not reserved:
        return []
    if not 0 < reserved < len(allowed):
        raise ConfigError(
            f"QUIRE_CPU_NUM_OF_RESERVED_CPU={reserved}: this process may use {len(allowed)} cores, and one at least"
            " must be left to compute on"
        )
    return allowed[reserved:]


def _listed(text: str, name: str) -> list[int]:
    """'0-3,8' -> [0, 1, 2, 3, 8]"""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if (
            not first.isdigit()
            or (dash and not last.isdigit())
            or (dash and int(last) < int(first))
        ):
            raise ConfigError(f"{name}={text}: auto, nobind, or a list of cores such as 0-3,8")
        cores.update(range(int(first), int(last if dash else first) + 1))
    return sorted(cores)
