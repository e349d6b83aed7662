"""The kernels' threads sleep soon after an operation, also where torch was loaded first, and a forked process has a team too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import env
from quire.ops.cpu import bindings

TESTS = Path(__file__).parents[1]
COMMON = """
import os, time
import torch
from ops.test_cpu_kernels import linear, pack
from quire.ops.cpu import bindings
kernels = bindings.best()
torch.manual_seed(0)
x, weight = torch.randn(8, 1024).bfloat16(), torch.randn(2048, 1024).bfloat16()
packed = pack(kernels, weight, False)
def compute():
    return linear(kernels, x, packed, None, 2048, False)
torch.set_num_threads(1)
want = compute()
torch.set_num_threads(2)
"""


def result_of(program: str) -> list[str]:
    if bindings.best() is None:
        pytest.skip("the native kernels do not run on this CPU")
    variables = env.for_a_child(
        PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent), *sys.path])
    )
    variables.pop("GOMP_SPINCOUNT", None)  # a notebook that has loaded torch
    done = subprocess.run(
        [sys.executable, "-c", COMMON + program],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_threads_that_wait_use_no_cpu_time() -> None:
    """libgomp's threads spin for 5 to 20 ms after an operation."""
    program = """
spent = []
for _ in range(20):
    compute()
    before = time.process_time()
    time.sleep(0.05)
    spent.append(time.process_time() - before)
print(sorted(spent)[10] < 0.002, torch.equal(compute(), want), sorted(spent)[10])
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(names.count("quire-kernels"))
"""
    slept, equal, spent, helpers = result_of(program)
    assert slept == "True", f"{spent} s of CPU time while nothing was computed"
    assert (equal, helpers) == ("True", "1")


@pytest.mark.slow
def test_a_forked_process_computes_with_a_team_of_its_own() -> None:
    program = """
compute()
child = os.fork()
equal = torch.equal(compute(), want)
if not child:
    tasks = len(os.listdir("/proc/self/task"))
    os._exit(0 if equal and tasks == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), equal)
"""
    assert result_of(program) == ["0", "True"]


@pytest.mark.slow
def test_a_team_larger_than_the_machine_gives_the_same_bits() -> None:
    program = """
for threads in (3, 16, 2, 40, 1):
    torch.set_num_threads(threads)
    print(torch.equal(compute(), want))
"""
    assert result_of(program) == ["True"] * 5
