"""Which cores are computed on, from the two variables that say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.platforms.cpu_affinity import all_but_one, chosen_cores, one_node, threads


@pytest.mark.parametrize(
    ("bind", "reserved", "cores"),
    [
        ("auto", 0, []),
        ("auto", 1, [3, 4, 5]),
        ("auto", 3, [5]),
        ("nobind", 2, []),
        ("3-5", 0, [3, 4, 5]),
        ("5,2-3", 1, [2, 3, 5]),
        ("2-3|4-5", 0, [2, 3]),
    ],
)
def test_cores(bind, reserved, cores):
    assert chosen_cores(bind, reserved, [2, 3, 4, 5], [2, 3, 4, 5]) == cores


@pytest.mark.parametrize(
    ("bind", "reserved", "says"),
    [
        ("0-3", 0, "THREADS_BIND=0-3: this process may not use core 0; allowed: 2,3,4,5"),
        ("all", 0, "THREADS_BIND=all: must be auto, nobind, or a list of cores such as 0-3,8"),
        ("5-3", 0, "a list of cores such as"),
        ("3-", 0, "a list of cores such as"),
        ("3,,4", 0, "a list of cores such as"),
        ("auto", 4, "RESERVED_CPU=4: this process may use 4 cores"),
        ("auto", -1, "RESERVED_CPU=-1"),
    ],
)
def test_cores_that_cannot_be(bind, reserved, says):
    with pytest.raises(ConfigError, match=says):
        chosen_cores(bind, reserved, [2, 3, 4, 5], [2, 3, 4, 5])


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def two_sockets(root: Path, free: tuple[int, int] = (5, 9)) -> Path:
    """Of 4 physical cores each, two threads a core: 0-3 and 8-11, 4-7 and 12-15."""
    files = {}
    for node, (cores, kib) in enumerate(zip(("0-3,8-11", "4-7,12-15"), free, strict=True)):
        files[f"sys/devices/system/node/node{node}/cpulist"] = cores
        files[f"sys/devices/system/node/node{node}/meminfo"] = f"Node {node} MemFree: {kib} kB"
    for core in range(16):
        siblings = f"{core % 8},{core % 8 + 8}"
        files[f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"] = siblings
    return machine(root, files)


def test_threads_stay_on_one_numa_node(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    everything = list(range(16))
    assert one_node(everything, root) == [4, 5, 6, 7, 12, 13, 14, 15]  # more is free there
    assert one_node([0, 1, 2, 4, 5], root) == [0, 1, 2]
    assert one_node([2, 3], tmp_path / "says nothing") == [2, 3]
    assert chosen_cores("auto", 0, everything, one_node(everything, root)) == [4, 5, 6, 7, 12, 13, 14, 15]  # fmt: skip
    assert chosen_cores("auto", 2, everything, one_node(everything, root)) == [6, 7, 12, 13, 14, 15]
    assert chosen_cores("auto", 0, [0, 1], one_node([0, 1], root)) == []
    assert chosen_cores("3,4", 0, everything, one_node(everything, root)) == [3, 4]


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 4),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 4),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/host/path",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
)
def test_the_cpu_quota_limits_the_threads(
    files: dict[str, str], count: int, tmp_path: Path
) -> None:
    root = machine(two_sockets(tmp_path), files)
    assert threads([4, 5, 6, 7, 12, 13, 14, 15], root) == count
    assert threads([4, 12], root) == 1


def test_one_of_many_cores_is_reserved_for_the_server(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    everything = list(range(16))
    assert all_but_one(everything, everything, root) == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
    ]
    assert all_but_one(everything, one_node(everything, root), root) == []  # a node is free
    assert all_but_one(everything[:15], everything[:15], root)[0] == 1  # 8 physical ones still
    assert all_but_one(list(range(7)), list(range(7)), root) == []
    assert all_but_one(list(range(9)), list(range(9)), tmp_path / "says nothing") == list(range(1, 9))  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux binds")
def test_the_process_is_pinned_to_its_cores():
    allowed = os.sched_getaffinity(0)
    core, node = max(allowed), set(one_node(sorted(allowed)))
    code = "import os; from quire.platforms.cpu_affinity import bind_to_cores; print(bind_to_cores(), os.sched_getaffinity(0))"
    for value, says in (
        (str(core), f"[{core}] {{{core}}}"),
        ("auto", f"{sorted(node) if node < allowed else []} {node}"),
        ("", f"{sorted(node) if node < allowed else []} {node}"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": value},
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.stdout.strip() == says, done.stderr
