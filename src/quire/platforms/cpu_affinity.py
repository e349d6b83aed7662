"""CPU affinity and number of threads of this process.

QUIRE_CPU_OMP_THREADS_BIND and QUIRE_CPU_NUM_OF_RESERVED_CPU set them. The default is one NUMA node, one thread per
physical core, and at most as many threads as the cgroup's CPU quota. Affinity is set before torch is imported, because
torch's threads inherit it from the thread that creates them.

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
MANY = 8  # physical cores, from which on one is left free


def bind_to_cores(computing: bool = True, rank: int = 0, size: int = 1) -> list[int]:
    """Bind this process to the configured cores, or to the cores of one NUMA node; return them, or [] if not bound.

    Args:
        computing: the model runs on this CPU. Else the process binds only to configured cores.
        rank, size: several processes of this engine compute, and share the cores; this one's number.

    Raises:
        ConfigError: the list of cores is malformed, or has a core that this process may not use.
    """
    if not hasattr(os, "sched_setaffinity"):
        return []  # only Linux has it
    allowed = sorted(os.sched_getaffinity(0))
    bind, node = _bind(), allowed
    if computing:
        node = one_node(allowed) if size == 1 else by_node(allowed)
    if "|" in bind:  # a list for each process
        bind = (bind.split("|") * size)[rank]
    cores = chosen_cores(bind, int(env.get("CPU_NUM_OF_RESERVED_CPU")), allowed, node)
    if size > 1 and "|" not in _bind():
        cores = part_of_cores(cores or node, rank, size)
    if cores:
        os.sched_setaffinity(0, cores)
        logger.info("computing on cores %s", ",".join(map(str, cores)))
    return cores


def part_of_cores(cores: list[int], rank: int, size: int) -> list[int]:
    """The cores of one of several processes: neighbours; one, that others use too, if there are not enough."""
    if len(cores) < size:
        return [cores[rank % len(cores)]]
    return cores[rank * len(cores) // size : (rank + 1) * len(cores) // size]


def leave_a_core() -> list[int]:
    """Leave one of many cores to the HTTP server; return the cores of this process, or [] if it keeps all.

    With a thread on every core, each barrier waits for the thread that shares its core with the HTTP server: up to a
    time slice of the kernel's scheduler (8 ms measured). A machine with few cores keeps all of them for the model.
    """
    if (
        not hasattr(os, "sched_setaffinity")
        or _bind() != "auto"
        or env.get("CPU_NUM_OF_RESERVED_CPU")
    ):
        return []  # the user has chosen
    allowed = sorted(os.sched_getaffinity(0))
    cores = all_but_one(allowed, one_node(allowed))
    if cores:
        os.sched_setaffinity(0, cores)
        logger.info("leaving core %d to the HTTP server", min(set(allowed) - set(cores)))
    return cores


def all_but_one(allowed: list[int], node: list[int], root: Path = Path("/")) -> list[int]:
    """All but the first physical core; [] if there are fewer than MANY, or another node has free cores anyway."""
    if len(node) < len(allowed) or threads(node, root) < MANY:
        return []
    first = {node[0], *_siblings(node[0], root)}
    return [core for core in node if core not in first]


def chosen_cores(bind: str, reserved: int, allowed: list[int], node: list[int]) -> list[int]:
    """The cores to bind to, or [] to leave placement to the kernel.

    Args:
        bind: `nobind` leaves placement to the kernel; `auto` uses the node's cores except the reserved; or a list
            `0-3,8`. Of lists for several workers, `0-3|4-7`, it uses the first.
        reserved: how many cores not to compute on: the first ones, which handle interrupts.
        allowed: cores that this process may use.
        node: the allowed cores on the chosen NUMA node.
    """
    if bind == "nobind":
        return []
    if bind != "auto":
        cores = _listed(bind.partition("|")[0], NAME)
        if missing := sorted(set(cores) - set(allowed)):
            raise ConfigError(
                f"{NAME}={bind}: this process may not use core {missing[0]}; allowed: {','.join(map(str, allowed))}"
            )
        return cores
    if not reserved:
        return node if len(node) < len(allowed) else []
    if not 0 < reserved < len(node):
        raise ConfigError(
            f"QUIRE_CPU_NUM_OF_RESERVED_CPU={reserved}: this process may use {len(node)} cores, and at least one must"
            " remain for computing"
        )
    return node[reserved:]


def one_node(allowed: list[int], root: Path = Path("/")) -> list[int]:
    """The allowed cores of the NUMA node that has most of them; among equals, of the one with the most free memory.

    Reads from another node's memory run at half the speed or less, and barriers wait for the slowest thread. All
    allowed cores, if /sys lists no nodes.
    """
    best: tuple[int, int, list[int]] | None = None
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cores = sorted(set(allowed) & set(_cores_in(folder / "cpulist")))
        if cores and (best is None or (len(cores), _free(folder)) > best[:2]):
            best = (len(cores), _free(folder), cores)
    return best[2] if best else allowed


def by_node(allowed: list[int], root: Path = Path("/")) -> list[int]:
    """The allowed cores, the cores of each NUMA node side by side, so that several processes do not share a node needlessly."""
    found: list[int] = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        found += sorted(set(allowed) & set(_cores_in(folder / "cpulist")))
    return [*found, *(core for core in allowed if core not in found)]


def threads(cores: list[int], root: Path = Path("/")) -> int:
    """The number of threads for these cores: one per physical core, because two on one share its multipliers; and at
    most the CPU quota, because a cgroup that exceeds it stops all its threads for the rest of each period."""
    seen: set[int] = set()
    count = 0
    for core in cores:
        count += core not in seen
        seen.update(_siblings(core, root))
    quota = detect.cpu_quota(root)
    return max(1, count if quota is None else min(count, int(quota)))


def physical_cores() -> int:
    """The number that this process may use, and at most its CPU quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return threads(sorted(os.sched_getaffinity(0)))


def _siblings(core: int, root: Path) -> list[int]:
    return _cores_in(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")


def threads_here() -> int:
    """The number of threads of this process: for a configured list of cores, one per core."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if _bind() not in ("auto", "nobind"):
        return len(cores)
    return threads(cores)


def _bind() -> str:
    return str(env.get("CPU_OMP_THREADS_BIND")).strip() or "auto"  # some deployments set it to ""


def _free(folder: Path) -> int:
    """Free memory of a node, in KiB."""
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
            raise ConfigError(
                f"{name}={text}: must be auto, nobind, or a list of cores such as 0-3,8"
            )
        cores.update(range(int(first), int(last if dash else first) + 1))
    return sorted(cores)
