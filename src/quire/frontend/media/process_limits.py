"""Limits of a process that decodes files of strangers. Knows the kernel's limits. Does not know files."""

from __future__ import annotations

import resource


def limit_memory(more: int) -> None:
    """From now on this process may take this number of bytes more than it has, and write no file."""
    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
