"""A rank that is killed, stopped or raises, before, in and after an exchange: the engine ends with the reason, and nothing is left."""

from __future__ import annotations

import os
import signal
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
