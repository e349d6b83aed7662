"""Resident memory of processes. Knows /proc; finds nothing on systems without it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants. Reads the entry of every process: do not call it often."""
    parents: dict[int, int] = {}
    for place in PROC.glob("[0-9]*"):
        try:
            # pid (name) state parent ...: the name may contain anything, also a ")"
            parents[int(place.name)] = int(
                (place / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except (OSError, ValueError, IndexError):
            continue  # the process has ended
    found = [pid]
    for one in found:  # grows as it goes
        found += [child for child, parent in parents.items() if parent == one]
    return found


def resident_bytes(pids: Iterable[int]) -> int:
    """Sum of the processes' resident bytes; shared pages count once for each process."""
    total = 0
    for pid in pids:
        try:
            for line in (PROC / str(pid) / "status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            continue
    return total
