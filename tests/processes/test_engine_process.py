"""An engine in its own process gives the same tokens, and no request waits forever when it dies or hangs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from equality.engines import engine, greedy, make_checkpoint, prompts

from quire import env
from quire.config.engine import EngineConfig
from quire.config.serialize import resolved_to_bytes
from quire.engine import flight_recorder, supervisor
from quire.engine.process_client import ProcessClient
from quire.engine.resolve import resolve_config
from quire.engine.supervisor import EngineSupervisor
from quire.errors import (
    EngineDeadError,
    EngineDelayed,
    QuireError,
    StartupError,
    ValidationError,
)
from quire.processes.restart_policy import RestartPolicy
from quire.protocol.output import EngineOutput
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

SETTINGS = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "resume": "off",  # test_resume.py has the rest
}
LONG = 4000  # tokens: a request that is still running when something happens to it


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), max_position_embeddings=4096)


@pytest.fixture(scope="module", autouse=True)
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where recordings of deaths go. The kernels are there, so that no engine compiles them again."""
    root = tmp_path_factory.mktemp("cache")
    kernels = Path(str(env.get("CACHE_ROOT"))).expanduser() / "kernels"
    if kernels.is_dir():
        shutil.copytree(kernels, root / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_ROOT", str(root))
        yield root


@contextlib.contextmanager
def started(path: str, policy: RestartPolicy | None = None) -> Iterator[ProcessClient]:
    resolved = resolve_config(EngineConfig.from_keywords(model=path, **SETTINGS))
    keeper = EngineSupervisor(resolved_to_bytes(resolved), 1, policy)
    client = ProcessClient(resolved, keeper.folder, keeper.board, keeper)
    try:
        client.wait_ready(200)  # a test has 240
        yield client
    finally:
        client.close()
        assert not client.supervisor.folder.exists()


@pytest.fixture(scope="module")
def client(path: str) -> Iterator[ProcessClient]:
    """It is killed by one test after the other, and starts again."""
    with started(path, RestartPolicy(restarts=100)) as found:
        yield found


@pytest.fixture(scope="module")
def watched(path: str) -> Iterator[ProcessClient]:
    """Its engine counts as dead after four silent seconds."""
    with started(path, RestartPolicy(restarts=100, heartbeat=4.0)) as found:
        yield found


Got = dict[str, list[EngineOutput]]


def collect(
    client: ProcessClient, ids: set[str], before: Got | None = None, within: float = 200.0
) -> Got:
    """All outputs of these, with what came `before`."""
    got: Got = {id: [] for id in ids} | (before or {})
    end = time.monotonic() + within
    while not all(outputs and outputs[-1].finish for outputs in got.values()):
        assert time.monotonic() < end, f"no answer within {within} s"
        for output in client.outputs():
            got[output.id].append(output)
    return got


def submit(client: ProcessClient, prefix: str, count: int, tokens: int) -> set[str]:
    for number, prompt in enumerate(prompts(count)):
        client.submit(EngineRequest(f"{prefix}{number}", prompt, greedy(tokens)))
    return {f"{prefix}{number}" for number in range(count)}


def answers(got: dict[str, list[EngineOutput]]) -> dict[str, list[int]]:
    return {id: [t for out in outs for t in out.tokens] for id, outs in got.items()}


def begun(client: ProcessClient, ids: set[str]) -> Got:
    """Wait until each has an output; all that came until then."""
    got: Got = {}
    while set(got) < ids:
        for output in client.outputs():
            got.setdefault(output.id, []).append(output)
    return got


def die(client: ProcessClient) -> None:
    os.kill(client.supervisor.child.pid, signal.SIGKILL)


def hang(client: ProcessClient) -> None:
    os.kill(client.supervisor.child.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("which", "blow", "word"),
    [("client", die, "SIGKILL"), ("watched", hang, "no heartbeat")],
    ids=["die", "hang"],
)
def test_every_request_is_answered_and_the_engine_restarts(
    which: str, blow: Callable, word: str, cache_root: Path,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    client: ProcessClient = request.getfixturevalue(which)
    crashes, epoch = cache_root / "crashes", client.epoch
    kept = set(crashes.glob("*"))
    logged: list[str] = []
    monkeypatch.setattr(
        supervisor.log, "error", lambda form, *args: logged.append(form % args if args else form)
    )
    running = submit(client, "running", 8, LONG)  # all the rows there are
    waiting = submit(client, "waiting", 4, 5)
    seen = begun(client, running)
    before = client.supervisor.child.pid
    blow(client)
    got = collect(client, running | waiting, seen)
    for id in running:
        assert got[id][-1].finish == "error"
        incident = got[id][-1].error.split()[-1]
        [why] = [line for line in logged if incident in line]
        assert word in why
        assert word not in got[id][-1].error
        assert got[id][-1].error_kind == "reported"
    for id in waiting:
        assert got[id][-1].finish == "length"
    assert client.supervisor.child.pid != before
    assert client.state().condition == "ready"
    assert client.epoch == epoch + 1
    [new] = set(crashes.iterdir()) - kept
    recording = flight_recorder.read_recording(new)
    assert recording is not None
    assert recording.seen() == running


def test_tokens_equal_those_of_an_engine_in_this_process_also_after_a_restart(
    path: str, client: ProcessClient
) -> None:
    """The second time, the requests arrive while the engine process is down."""
    with engine(path) as one:
        want = one.tokens(prompts(6), greedy(20))
    epoch, before = client.epoch, client.call("stats")["generation_tokens"]
    got = answers(collect(client, submit(client, "first", 6, 20)))
    assert [got[f"first{n}"] for n in range(6)] == want
    assert client.call("stats")["generation_tokens"] == before + 120
    assert client.call("reset_prefix_cache") is True
    die(client)
    got = answers(collect(client, submit(client, "second", 6, 20)))
    assert [got[f"second{n}"] for n in range(6)] == want
    assert client.epoch == epoch + 1


@pytest.mark.slow
def test_after_too_many_crashes_the_restart_is_delayed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(It stayed dead, and its server ended: four requests of one client were enough.)"""
    with started(path, RestartPolicy(restarts=1)) as client:
        has_passed, closing = threading.Event(), client.supervisor._closing

        def wait(seconds: float) -> bool:
            assert not seconds or has_passed.wait(200)
            return closing.is_set()

        monkeypatch.setattr(closing, "wait", wait)  # for the next start
        for death in range(2):
            ids = {f"{death}-{number}" for number in range(2)}
            for number, id in enumerate(sorted(ids)):
                client.submit(EngineRequest(id, [1 + death, 2 + number], greedy(LONG)))
            seen = begun(client, ids)
            die(client)
            got = collect(client, ids, seen)
            assert {outs[-1].finish for outs in got.values()} == {"error"}
        assert {outs[-1].error_kind for outs in got.values()} == {"overloaded"}
        assert client.state().condition == "delayed"
        with pytest.raises(EngineDelayed):
            client.submit(EngineRequest("early", [1], greedy(1)))
        has_passed.set()
        while client.state().condition == "delayed":
            time.sleep(0.05)
        got = collect(client, submit(client, "late", 2, 5))
        assert {outs[-1].finish for outs in got.values()} == {"length"}
        assert client.epoch == 3


@pytest.mark.slow
def test_without_restarts_a_crash_is_final(path: str) -> None:
    with started(path, RestartPolicy(restarts=0)) as client:
        ids = submit(client, "r", 2, LONG)
        seen = begun(client, ids)
        die(client)
        with pytest.raises(EngineDeadError, match="not restarted"):
            collect(client, ids, seen)
        with pytest.raises(EngineDeadError, match="not restarted"):
            client.submit(EngineRequest("late", [1], SamplingParams(max_tokens=1)))
        assert client.state().condition == "dead"


def test_a_request_running_at_two_crashes_is_refused(client: ProcessClient) -> None:
    """Also by a frontend that was not connected at the crashes."""
    for name in ("first", "second"):
        client.submit(EngineRequest(name, [5, 6, 7], greedy(LONG)))
        seen = begun(client, {name})
        die(client)
        got = collect(client, {name}, seen)
        assert got[name][-1].finish == "error"
    other = ProcessClient(
        client.resolved, client.supervisor.folder, client.supervisor.board, client=1
    )
    try:
        with pytest.raises(ValidationError, match="died twice"):
            other.submit(EngineRequest("third", [5, 6, 7], greedy(LONG)))
    finally:
        other.close()
    got = collect(client, submit(client, "good", 2, 5))
    assert {outs[-1].finish for outs in got.values()} == {"length"}


def test_a_call_does_not_wait_for_a_dead_engine(client: ProcessClient) -> None:
    hang(client)
    asked = client.ask("stats")
    die(client)
    with pytest.raises(QuireError, match="restarted before"):
        client.answer_to(asked)


@pytest.mark.slow
def test_a_restarted_engine_keeps_its_pause_and_sleep(client: ProcessClient) -> None:
    """Regression: the new process was awake and served, although the operator had paused it and put it to sleep."""
    epoch = client.epoch
    assert client.call("hold", "keep") == 0
    assert client.call("pause")
    assert client.call("sleep", 1)
    assert client.call("wake_up", ["weights"]) == ["kv_cache"]
    die(client)
    ids = submit(client, "r", 2, 5)
    while client.epoch == epoch:
        time.sleep(0.05)
        with contextlib.suppress(QuireError):
            client.call("stats")
    assert client.call("is_sleeping")
    assert client.call("stats")["state"] == "weights_offloaded"
    assert client.call("stats")["waiting"] == 2
    assert client.call("wake_up") == []
    assert client.call("is_paused")
    assert client.call("stats")["steps"] == 0
    assert client.call("resume")
    got = collect(client, ids)
    assert {outs[-1].finish for outs in got.values()} == {"length"}


@pytest.mark.slow
def test_a_failed_start_reports_the_reason(path: str) -> None:
    weights = Path(path) / "model.safetensors"
    data = weights.read_bytes()
    try:
        weights.write_bytes(data[:-400])
        with pytest.raises((StartupError, Exception), match="safetensors"), started(path):
            pass
    finally:
        weights.write_bytes(data)


PARENT = """
import sys
from quire.config.engine import EngineConfig
from quire.engine import build
if __name__ == "__main__":
    client = build.make_client(EngineConfig.from_keywords(model=sys.argv[1], max_model_len=64), process=True)
    print(client.supervisor.child.pid, client.supervisor.folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_killing_the_parent_leaves_no_orphan(path: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        pid, _ = parent.stdout.readline().split()
        parent.kill()
        end = time.monotonic() + 60
        while Path(f"/proc/{int(pid)}").exists() and time.monotonic() < end:
            time.sleep(0.05)
    assert not Path(f"/proc/{int(pid)}").exists()


WAKE = """
for one in {0}; do
    while [ -e /proc/$one ] && ! grep -q "^State:.*stopped" /proc/$one/status; do sleep 0.1; done
done
sleep 6
kill -CONT {0}
"""


@pytest.mark.slow
def test_suspending_both_processes_is_not_a_hang(watched: ProcessClient) -> None:
    """A paused container: host and engine stop and go on together; the host must not think the engine dead."""
    client = watched
    before = client.supervisor.child.pid
    ids = submit(client, "r", 2, 200)
    seen = begun(client, ids)
    script = WAKE.format(f"{before} {os.getpid()}")
    with subprocess.Popen(["sh", "-c", script], start_new_session=True):
        os.kill(before, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        got = collect(client, ids, seen)
    assert {outs[-1].finish for outs in got.values()} == {"length"}
    assert client.supervisor.child.pid == before
