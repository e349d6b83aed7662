"""Executors: a worker here or in a process of its own gives the same, and says what went wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from devices import Driver, Executed, TinyModel, enter, follow, generate, make_worker

from quire.errors import ConfigError, EngineDeadError, QuireError, StartupError, StepFailed
from quire.executor import rank_process
from quire.executor.inline import InlineExecutor
from quire.executor.multiproc_executor import MultiprocExecutor
from quire.executor.rank_process import spawn
from quire.protocol.plan import StepPlan, WorkItem
from quire.protocol.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=1)


def group(target: str, *payloads: bytes, **options) -> MultiprocExecutor:
    return MultiprocExecutor(target, payloads, [spawn] * len(payloads), **options)


@dataclass(frozen=True)
class Point:
    x: int


# -- made in the child ------------------------------------------------------------------------
def tiny(payload: bytes, report=None):
    model = TinyModel()
    worker = make_worker(model)

    def fail_next(value: bool) -> None:
        model.fail = value

    def grumble(number: int) -> None:
        raise ValueError(f"{number} is too much")

    def point() -> dict:
        return {Point(1): 2}

    class Odd(Exception):
        pass

    def odd() -> None:
        raise Odd("very")

    worker.functions |= {
        "payload": lambda: payload,
        "pid": os.getpid,
        "fail_next": fail_next,
        "grumble": grumble,
        "odd": odd,
        "point": point,
        "leave": lambda code: os._exit(code),
        "object": object,
        "big": lambda size: b"x" * size,
        "length": len,
        "apply_model": lambda function: function(model),
    }
    return worker


def vocabulary(model) -> int:
    return model.vocab_size


@pytest.fixture(scope="module")
def shared():
    """For tests that leave the child as they found it."""
    executor = group("test_executors:tiny", b"hello")
    yield executor
    executor.close()


@pytest.fixture
def process():
    executor = group("test_executors:tiny", b"hello")
    yield executor
    executor.close()


def test_both_executors_give_the_same_results(shared):
    prompts = {
        0: ([5, 6, 7], GREEDY),
        1: ([9], SamplingParams(temperature=1.0, seed=7, logprobs=3)),
        2: (list(range(20)), SamplingParams(temperature=0.8, top_p=0.9, seed=8, bad_words=["no"])),
        3: (
            [9, 8],
            SamplingParams(temperature=1.0, prompt_logprobs=2, logit_bias={3: 2.5}, seed=1),
        ),
    }
    prompts[2][1].bad_word_ids = [[4, 5], [6]]
    here = generate(Executed(InlineExecutor(make_worker())), prompts, 8)
    there = generate(Executed(shared), prompts, 8)
    assert here == there
    assert shared.call("payload") == [b"hello"]
    assert shared.call("pid") == [shared.members[0].process.pid]


def test_several_steps_in_flight(shared):
    plans = [StepPlan(1, [enter(0, [5, 6], GREEDY)], [WorkItem(0, 2)], [])]
    plans += [StepPlan(step, [], [WorkItem(0, 1)], []) for step in range(2, 9)]
    expected = [InlineExecutor(worker).launch(plan).result() for worker in [make_worker()] for plan in plans]  # fmt: skip
    pending = [shared.launch(plan) for plan in plans]
    assert shared.call("ping") == [True]
    assert [step.result() for step in reversed(pending)] == expected[::-1]
    assert pending[0].result() == expected[0]
    shared.launch(StepPlan(9, [], [], [0])).result()


def test_large_messages_in_both_directions_do_not_deadlock(shared):
    """Much in both directions at once, and more than a socket holds."""
    size, (member,) = 4_000_000, shared.members
    member.request(_ask("big", size))
    last = member.request(_ask("length", b"y" * size))
    while (answer := member.look(last, 1.0)) is None:
        pass
    assert answer.value == size


def _ask(name, *args):
    from quire.executor.messages import CallWorker, encode

    return encode(CallWorker(name, list(args)))


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_a_failed_step_is_no_more_than_that(kind, request):
    executor = InlineExecutor(tiny(b"")) if kind == "inline" else request.getfixturevalue("shared")
    drive = Driver(Executed(executor))
    drive([WorkItem(0, 2)], [enter(0, [5, 6], GREEDY)])
    executor.call("fail_next", True)
    pending = executor.launch(StepPlan(9, [enter(1, [5, 6], GREEDY)], [WorkItem(1, 2)], []))
    executor.call("fail_next", False)
    with pytest.raises(StepFailed, match="ValueError: the toy fails") as failure:
        pending.result()
    assert isinstance(failure.value, executor.recoverable)
    if kind == "process":
        assert "in forward" in failure.value.__notes__[0]
    drive.left = [1]
    assert drive([WorkItem(0, 1)]).tokens == [follow(TinyModel(), [5, 6], 2)[1:]]
    drive.left = [0]
    drive([])


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_calls(kind, request):
    executor = InlineExecutor(tiny(b"")) if kind == "inline" else request.getfixturevalue("shared")
    assert executor.call("collective_rpc", "ping") == [True]
    assert executor.call("collective_rpc", "length", [[1, 2]], {}) == [2]
    assert executor.call("apply_model", vocabulary) == [211]
    with pytest.raises(ValueError, match="no function 'nonsense'; it has"):
        executor.call("nonsense")
    with pytest.raises(ValueError, match="3 is too much"):
        executor.call("grumble", 3)
    if kind == "process":
        with pytest.raises(QuireError, match="Odd: very"):
            executor.call("odd")
        with pytest.raises(TypeError, match="object cannot be sent"):
            executor.call("object")
        # msgpack encodes these and does not decode them: in an answer, and in a call
        with pytest.raises(TypeError, match=r"cannot be sent to another process.* hashable"):
            executor.call("point")
        with pytest.raises(TypeError, match=r"cannot be sent to another process.* hashable"):
            executor.call("length", {Point(1): 2})
        with pytest.raises(ConfigError, match="cannot be imported by another process"):
            executor.call("apply_model", lambda model: 1)
    assert executor.call("ping") == [True]


def test_a_worker_that_cannot_start():
    with pytest.raises(ConfigError, match=r"^max_num_seqs must be even$"):
        group("stub_workers:misconfigured", b"")
    with pytest.raises(
        StartupError, match="ZeroDivisionError: in the middle of loading"
    ) as failure:
        group("stub_workers:broken", b"")
    assert "in broken" in failure.value.detail
    with pytest.raises(StartupError, match="ended with exit code 7"):
        group("stub_workers:vanishing", b"")


def test_the_progress_of_a_worker_reaches_the_engine():
    seen = []
    executor = group("stub_workers:slow", b"", report=lambda *about: seen.append(about))
    try:
        assert seen == [("reading weights", 0.25), ("reading weights", 0.5)]
        assert executor.call("a") == ["a"]
    finally:
        executor.close()


def test_ranks_whose_progress_nobody_reads_start(tmp_path):
    """One waits for the other, which has more to report than a pipe holds."""
    payloads = (f"{rank} {tmp_path}/loaded".encode() for rank in (0, 1))
    executor = group("stub_workers:waiting", *payloads)
    assert executor.call("a") == ["a", "a"]
    executor.close()


def test_a_stopped_worker_does_not_block_the_sender(monkeypatch):
    monkeypatch.setattr(rank_process, "STUCK_S", 1)
    monkeypatch.setattr(rank_process, "END_S", 0.1)
    executor = group("stub_workers:idle", b"")
    os.kill(executor.members[0].process.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="the worker's process is stopped"):
        executor.call("a", b"x" * 4_000_000)


def test_a_plan_that_contradicts_itself_ends_the_worker(process):
    pending = process.launch(StepPlan(1, [], [], [3]))
    with pytest.raises(EngineDeadError, match="row 3 is freed, but no request has it") as failure:
        pending.result()
    assert "in leave" in failure.value.__notes__[0]
    with pytest.raises(EngineDeadError, match="no request has it"):
        process.call("ping")


def test_a_killed_worker_is_noticed(process):
    step = process.launch(StepPlan(1, [enter(0, [5, 6], GREEDY)], [WorkItem(0, 2)], []))
    assert len(step.result().tokens) == 1
    os.kill(process.members[0].process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"ended by SIGKILL.*memory"):
        process.launch(StepPlan(2, [], [WorkItem(0, 1)], [])).result()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        process.launch(StepPlan(3, [], [WorkItem(0, 1)], []))
    assert time.monotonic() - began < 30


def test_signals_of_the_group_are_for_the_parent(shared):
    """Regression: SIGTERM of a service manager ended the ranks, and with them the requests that the server still served."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(shared.members[0].process.pid, number)
    assert shared.call("ping") == [True]


def test_close_ends_the_child(monkeypatch):
    monkeypatch.setattr("quire.executor.rank_process.END_S", 60.0)
    process = group("stub_workers:idle", b"")
    assert process.call("anything") == ["anything"]
    child = process.members[0].process
    pid = child.pid
    process.close()
    process.close()
    assert child.returncode == 0  # it went by itself
    assert not _lives(pid)
    with pytest.raises(EngineDeadError, match="shut down"):
        process.call("ping")


PARENT = """
import sys, time
from quire.executor.multiproc_executor import MultiprocExecutor
from quire.executor.rank_process import spawn
executor = MultiprocExecutor("stub_workers:idle", [b""], [spawn])
print(executor.members[0].process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_no_orphan_when_the_parent_is_killed(stopped):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)},
    )
    with parent:
        child = int(parent.stdout.readline())
        assert _lives(child)
        if stopped:
            os.kill(child, signal.SIGSTOP)
        parent.kill()
    end = time.monotonic() + 60
    while _lives(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
