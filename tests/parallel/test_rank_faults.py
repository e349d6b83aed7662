"""A rank that is killed, stopped or raises, before, in and after an exchange: the engine ends with the reason, and nothing is left.

Ranks end with the process that started them, and take no processor time without work.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import EngineDeadError
from quire.worker.hooks import Hook

LONG = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
FAULTY = 1  # the rank


class Fault(Hook):
    """Ends, stops or fails one rank at a place of its next step."""

    def __init__(self, rank: int, how: str, when: str):
        self.rank, self.how, self.when = rank, how, when

    def accepts_fast_step(self, plan: Any) -> bool:
        return True

    def before(self, plan: Any, batch: Any) -> None:
        if self.when == "before" and self.rank == FAULTY:
            self.act()
        if self.when == "in":  # the others come later: until then it waits for them
            if self.rank == FAULTY:
                threading.Timer(0.5, self.act).start()
            else:
                time.sleep(1.5)

    def after(self, plan: Any) -> None:
        if self.when == "after" and self.rank == FAULTY:
            self.act()

    def act(self) -> None:
        if self.how == "raise":
            raise RuntimeError("a fault of a test")
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)


def install(worker: Any, how: str, when: str) -> int:
    """Called in each rank."""
    worker.hooks.append(Fault(worker.rank, how, when))
    return int(worker.rank)


REASONS = {
    "kill": "was ended by SIGKILL",
    "stop": "was stopped|waited (.* )?for rank",
    "raise": "rank 1 failed a step: .*a fault of a test",
}
CASES = [
    (how, when)
    for how in REASONS
    for when in ("before", "in", "after")
    if (how, when) != ("raise", "in")
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "when"), CASES)
def test_a_faulty_rank_ends_the_engine(how: str, when: str) -> None:
    llm = LLM("quire-tiny", max_model_len=256, tensor_parallel_size=2)
    executor = llm.client.core.executor  # type: ignore[attr-defined]
    members = executor.members
    try:
        arguments = [install, how, when]
        assert executor.call("collective_rpc", "call_function", arguments, {}) == [0, 1]
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=REASONS[how]):
            llm.generate(["The quick brown fox"] * 3, LONG, use_tqdm=False)
        assert time.monotonic() - began < 30
        assert all(member.process.poll() is not None for member in members)
        with pytest.raises(EngineDeadError):
            llm.generate("again", LONG, use_tqdm=False)
    finally:
        llm.shutdown()
    assert not [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "quire-ranks" in line
    ]
    targets = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not [target for target in targets if "quire-ranks" in target]


LAYOUTS = ["tensor_parallel_size", "pipeline_parallel_size"]


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_are_idle_take_no_processor_time(layout: str) -> None:
    with LLM("quire-tiny", max_model_len=256, **{layout: 2}) as llm:
        llm.generate(["The quick brown fox"] * 2, LONG, use_tqdm=False)
        members = llm.client.core.executor.members  # type: ignore[attr-defined]
        before = [cpu_s(member.process.pid) for member in members]
        time.sleep(2)
        for member, was in zip(members, before, strict=True):
            assert cpu_s(member.process.pid) - was < 0.2


DRIVER = """
import sys
from quire import LLM, SamplingParams

llm = LLM("quire-tiny", max_model_len=2048, **{sys.argv[1]: 2})
params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
llm.generate("The quick", SamplingParams(max_tokens=4), use_tqdm=False)
print(*(member.process.pid for member in llm.client.core.executor.members), flush=True)
while True:
    llm.generate(["The quick brown fox"] * 4, params, use_tqdm=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_end_with_their_driver(layout: str, stopped: bool) -> None:
    """In the middle of steps; also a rank that is stopped, for which the other waits in an exchange."""
    command = [sys.executable, "-c", DRIVER, layout]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2
        began = [cpu_s(pid) for pid in pids]
        until = time.monotonic() + 60
        while any(cpu_s(pid) < was + 0.3 for pid, was in zip(pids, began, strict=True)):
            assert time.monotonic() < until
            time.sleep(0.05)
        if stopped:
            os.kill(pids[FAULTY], signal.SIGSTOP)
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    until = time.monotonic() + 30
    while any(map(runs, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
