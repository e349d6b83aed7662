"""Which cores this process computes on, and with how many threads.

QUIRE_CPU_OMP_THREADS_BIND and QUIRE_CPU_NUM_OF_RESERVED_CPU say so, else the machine does: one node of memory, a thread
for each physical core, and no more threads than the cgroup's quota keeps running. Set before torch is imported, since
its threads take the affinity of the one that makes them.

Knows /sys and the kernel's affinity. Does not know torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from quire import env
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.platforms import detect

logger = get_logger(__name__)
NAME = "QUIRE_CPU_OMP_THREADS_BIND"
MANY = 8  # physical cores, of which one can be spared


def bind_to_cores(computing: bool = True) -> list[int]:
    """Keep this process on the cores that were asked for, or on one node's; which, or [] if it stays on all.

    Args:
        computing: the model runs on this CPU. Else only what was asked for is done.

    Raises:
        ConfigError: a list that cannot be read, or with a core that this process may not use.
    """
    if not hasattr(os, "sched_setaffinity"):
        return []  # only Linux binds
    allowed = sorted(os.sched_getaffinity(0))
    cores = chosen_cores(
        _bind(),
        int(env.get("CPU_NUM_OF_RESERVED_CPU")),
        allowed,
        one_node(allowed) if computing else allowed,
    )
    if cores:
        os.sched_setaffinity(0, cores)
        logger.info("computing on cores %s", ",".join(map(str, cores)))
    return cores


def leave_a_core() -> list[int]:
    """Keep this process off one core of many, for the processes beside it; the cores it stays on, or [] if on all.

    A team of threads as large as the machine waits, at each barrier, for the one that shares its core with whoever takes
    requests: up to a slice of the scheduler (8 ms were seen). Of few cores none can be spared.
    """
    if (
        not hasattr(os, "sched_setaffinity")
        or _bind() != "auto"
        or env.get("CPU_NUM_OF_RESERVED_CPU")
    ):
        return []  # somebody has chosen
    allowed = sorted(os.sched_getaffinity(0))
    cores = all_but_one(allowed, one_node(allowed))
    if cores:
        os.sched_setaffinity(0, cores)
        logger.info("core %d is left to the HTTP server", min(set(allowed) - set(cores)))
    return cores


def all_but_one(allowed: list[int], node: list[int], root: Path = Path("/")) -> list[int]:
    """All but the first physical core; [] if there are fewer than MANY, or some are free on another node anyway."""
    if len(node) < len(allowed) or threads(node, root) < MANY:
        return []
    first = {node[0], *_siblings(node[0], root)}
    return [core for core in node if core not in first]


def chosen_cores(bind: str, reserved: int, allowed: list[int], node: list[int]) -> list[int]:
    """The cores to bind to, or [] to leave that to the kernel.

    Args:
        bind: `nobind` leaves it to the kernel; `auto` takes the node's, less the reserved; or a list `0-3,8`. Of lists
            for several workers, `0-3|4-7`, the first is ours.
        reserved: how many cores not to compute on: the first ones, where interrupts are served.
        allowed: cores that this process may use.
        node: those of them that share the memory to compute in.
    """
    if bind == "nobind":
        return []
    if bind != "auto":
        wanted = _listed(bind.partition("|")[0], NAME)
        if missing := sorted(set(wanted) - set(allowed)):
            raise ConfigError(
                f"{NAME}={bind}: this process may not use core {missing[0]}; it may use"
                f" {','.join(map(str, allowed))}"
            )
        return wanted
    if not reserved:
        return node if len(node) < len(allowed) else []
    if not 0 < reserved < len(node):
        raise ConfigError(
            f"QUIRE_CPU_NUM_OF_RESERVED_CPU={reserved}: this process may use {len(node)} cores, and one at least"
            " must be left to compute on"
        )
    return node[reserved:]


def one_node(allowed: list[int], root: Path = Path("/")) -> list[int]:
    """Those cores that are on the node with most of them; of equals the one with the most free memory.

    What is on another node's memory is read at half the speed or less, and barriers wait for the slowest. All cores, if
    the machine does not say.
    """
    best: tuple[int, int, list[int]] | None = None
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cores = sorted(set(allowed) & set(_cores_in(folder / "cpulist")))
        if cores and (best is None or (len(cores), _free(folder)) > best[:2]):
            best = (len(cores), _free(folder), cores)
    return best[2] if best else allowed


def threads(cores: list[int], root: Path = Path("/")) -> int:
    """How many threads pay on these cores: one for each physical core, since two on one share its multipliers; and no
    more than the quota keeps running, or the cgroup stops all of them for the rest of each period."""
    seen: set[int] = set()
    count = 0
    for core in cores:
        count += core not in seen
        seen.update(_siblings(core, root))
    quota = detect.cpu_quota(root)
    return max(1, count if quota is None else min(count, int(quota)))


def _siblings(core: int, root: Path) -> list[int]:
    return _cores_in(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")


def threads_here() -> int:
    """How many threads this process computes with: of a list that was asked for, one for each core."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if _bind() not in ("auto", "nobind"):
        return len(cores)
    return threads(cores)


def _bind() -> str:
    return str(env.get("CPU_OMP_THREADS_BIND")).strip() or "auto"  # deployments set it to nothing


def _free(folder: Path) -> int:
    """KiB of a node's memory that nobody uses."""
    for line in _read(folder / "meminfo").splitlines():
        if "MemFree:" in line:
            return int(line.split("MemFree:")[1].split()[0])
    return 0


def _cores_in(path: Path) -> list[int]:
    text = _read(path).strip()
    return _listed(text, str(path)) if text else []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


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
