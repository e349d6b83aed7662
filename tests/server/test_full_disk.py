"""Log output, metrics and usage files on a full disk or an unread pipe: only they are lost."""

from __future__ import annotations

import os
import socket as sockets
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quire.config.server import ServerConfig
from quire.engine import sleep
from quire.engine.engine_state import EngineState
from quire.logging import get_logger
from quire.observe import processes
from quire.observe.processes import AllocatedDict
from quire.observe.prometheus import MergedCollector
from quire.processes.restart_policy import RestartCount, RestartPolicy
from quire.server import shared_usage
from quire.server.process import http_supervisor
from quire.server.process.sockets import bind_all, bind_beside
from quire.server.shared_usage import SharedUsageAccount, UsageLedger, forget
from quire.terminal import Output, OutputHandler, show

LINE = "x" * 1000
KEY = '["name", "name", {}, "help"]'


def no_space(*args: Any) -> None:
    raise OSError(28, "No space left on device")


# -- outputs ----------------------------------------------------------------------------------------
def written(output: Output, count: int) -> threading.Thread:
    thread = threading.Thread(target=lambda: [output.write(LINE + "\n") for _ in range(count)], daemon=True)  # fmt: skip
    thread.start()
    thread.join(60)
    return thread


def test_an_unread_pipe_delays_no_request():
    """(A line more than the pipe takes, and the event loop stood for ever.)"""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb", buffering=0) as reader:
        output = Output(stream)
        assert not written(output, 200).is_alive()
        assert output.dropped > 100
        before = reader.read(1 << 20)
        assert before.count(b"\n") + output.dropped == 200
        output.write("again\n")
        assert reader.read(1 << 20).decode().endswith("because the output blocked)\nagain\n")
        assert os.get_blocking(writing)  # as other programs at this pipe know it
        output.close()


def test_an_unread_socket_delays_no_request():
    ours, theirs = sockets.socketpair()
    with ours, theirs, os.fdopen(os.dup(ours.fileno()), "w") as stream:
        output = Output(stream)
        assert not written(output, 2000).is_alive()
        assert output.dropped
        theirs.close()
        output.write("nobody\n")
        output.close()


def test_a_closed_pipe_and_a_full_disk_cost_the_lines():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        output = Output(stream)
        output.write("nobody\n")
        assert output.dropped == 1
        show("nobody", stream)
        output.close()
    with open("/dev/full", "w") as stream:
        handler = OutputHandler(stream)
        for _ in range(3):
            handler.emit(get_logger("x").logger.makeRecord("x", 20, "f", 1, "text", (), None))
        assert handler.output.dropped == 3
        handler.close()


def test_log_lines_are_appended_to_a_file(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("before\n")
    with path.open("r+") as stream:
        stream.seek(0, os.SEEK_END)
        show("é", stream)
        stream.write("after\n")
    assert path.read_text() == "before\né\nafter\n"


# -- metrics ----------------------------------------------------------------------------------------
def test_metrics_continue_in_memory_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(The first page that the disk did not have ended the process with SIGBUS.)"""
    monkeypatch.setattr(processes.os, "posix_fallocate", no_space)
    made = AllocatedDict(str(tmp_path / "counter_1.db"))
    made.write_value(KEY, 3.0, 0.0)
    assert made.read_value(KEY) == (3.0, 0.0)
    made.close()


def test_values_move_to_memory_where_their_file_cannot_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "counter_1.db"
    made = AllocatedDict(str(path))
    assert path.stat().st_blocks * 512 >= processes.FIRST_BYTES  # not sparse
    made.write_value(KEY, 3.0, 0.0)
    monkeypatch.setattr(processes.os, "posix_fallocate", no_space)
    for number in range(2000):
        made.write_value(KEY.replace("name", f"name{number}"), float(number), 0.0)
    assert made.read_value(KEY) == (3.0, 0.0)
    assert made.read_value(KEY.replace("name", "name1999")) == (1999.0, 0.0)
    assert path.stat().st_size == processes.FIRST_BYTES
    made.close()


def test_a_file_of_values_grows_with_its_blocks(tmp_path: Path):
    path = tmp_path / "counter_1.db"
    made = AllocatedDict(str(path))
    for number in range(2000):
        made.write_value(KEY.replace("name", f"name{number}"), float(number), 0.0)
    made.close()
    assert path.stat().st_blocks * 512 >= path.stat().st_size > processes.FIRST_BYTES
    again = AllocatedDict(str(path))
    assert again.read_value(KEY.replace("name", "name7")) == (7.0, 0.0)
    again.close()


def test_unreadable_files_are_ignored(tmp_path: Path):
    collector = MergedCollector(str(tmp_path), legacy=True)
    (tmp_path / "counter_1.db").write_bytes(b"\xff\xff\xff\x7f")
    assert list(collector.collect()) == []


# -- accounts, and what operators asked for ---------------------------------------------------------
def test_an_account_without_a_file_is_this_processes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared_usage.os, "posix_fallocate", no_space)
    account = UsageLedger(tmp_path, 0, 2).account("key")
    assert not isinstance(account, SharedUsageAccount)
    account.begin()
    assert account.under_way == 1
    with pytest.raises(OSError, match="No space"):
        forget(tmp_path, 0, 2)  # the keeper logs it


def test_an_answer_does_not_wait_for_the_disk(tmp_path: Path):
    functions = dict.fromkeys(sleep.CHANGE, lambda: "done") | {"saved_state": dict}
    kept = sleep.persisting(functions, tmp_path / "missing" / "asked")
    assert kept["pause"]() == "done"


# -- HTTP processes that die often ------------------------------------------------------------------
def keeper(
    deaths: int, restarts: int, others: bool
) -> tuple[http_supervisor.HttpSupervisor, http_supervisor.HttpWorkerSlot]:
    made = object.__new__(http_supervisor.HttpSupervisor)
    listener = Mock()
    policy = RestartPolicy(restarts=restarts, retry=30.0)
    count = RestartCount(policy)
    for _ in range(deaths):
        count.after_death()
    process = Mock(poll=Mock(return_value=[]))
    child = http_supervisor.HttpWorkerSlot(0, listener, count, process, is_open=True)
    other = http_supervisor.HttpWorkerSlot(
        1, Mock(), count, process, is_open=others, is_given_up=not others
    )
    made.__dict__.update(
        children=[child, other], policy=policy, metrics_folder="/none",
        usage_folder=Path("/none"), count=2, stop_at=None, engine_died_at=None, logs=[Mock()],
        config=Mock(server=Mock(uds=None)), client=Mock(state=Mock(return_value=EngineState(1, "ready"))),
    )  # fmt: skip
    return made, child


@pytest.mark.parametrize("others", [True, False])
def test_http_processes_that_die_often_are_started_later(
    monkeypatch: pytest.MonkeyPatch, others: bool
):
    """(Eight slow requests of one client had each killed four times: no HTTP process was left.)"""
    monkeypatch.setattr(http_supervisor, "how_it_ended", lambda process: "was ended by SIGKILL")
    monkeypatch.setattr(http_supervisor, "SETTLE_S", 0.0)
    made, child = keeper(3, 3, others)
    listener, start = child.listener, Mock()
    made._start = start
    made._ended(child, child.process)
    assert not child.is_given_up
    assert 20 < child.start_at - time.monotonic() <= 30
    assert listener.close.called is others  # the last one's queue stays open
    child.cleanup.join(60)
    made._check(child)
    assert not start.called
    child.start_at = 0.0
    made._check(child)
    assert start.called


def test_where_nothing_is_replaced_the_last_one_ends_the_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_supervisor, "how_it_ended", lambda process: "was ended by SIGKILL")
    monkeypatch.setattr(http_supervisor, "SETTLE_S", 0.0)
    made, child = keeper(0, 0, others=False)
    made._ended(child, child.process)
    child.cleanup.join(60)
    assert child.is_given_up
    made.children[1].process = None
    made.children[1].cleanup = None
    made._read_status = Mock()
    child.cleanup = None
    assert made._turn() == 1


def test_a_queue_that_was_closed_is_bound_again():

    one, two = bind_all(ServerConfig(host="127.0.0.1", port=0), 2)
    name = two.getsockname()
    two.close()
    again = bind_beside(one.family, name)
    assert again.getsockname() == one.getsockname()
    for listener in (one, again):
        listener.close()
