"""Which cores are computed on, from the two variables that say so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire.errors import ConfigError
from quire.platforms.cores import chosen_cores


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
    assert chosen_cores(bind, reserved, [2, 3, 4, 5]) == cores


@pytest.mark.parametrize(
    ("bind", "reserved", "says"),
    [
        ("0-3", 0, "THREADS_BIND=0-3: this process may not use core 0; it may use 2,3,4,5"),
        ("all", 0, "THREADS_BIND=all: auto, nobind, or a list of cores such as 0-3,8"),
        ("5-3", 0, "a list of cores such as"),
        ("3-", 0, "a list of cores such as"),
        ("3,,4", 0, "a list of cores such as"),
        ("auto", 4, "RESERVED_CPU=4: this process may use 4 cores"),
        ("auto", -1, "RESERVED_CPU=-1"),
    ],
)
def test_cores_that_cannot_be(bind, reserved, says):
    with pytest.raises(ConfigError, match=says):
        chosen_cores(bind, reserved, [2, 3, 4, 5])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux binds")
def test_the_process_stays_there():
    core = max(os.sched_getaffinity(0))
    code = "import os; from quire.platforms.cores import bind_to_cores; print(bind_to_cores(), os.sched_getaffinity(0))"
    for value, says in (
        (str(core), f"[{core}] {{{core}}}"),
        ("auto", f"[] {os.sched_getaffinity(0)}"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": value},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == says, done.stderr
