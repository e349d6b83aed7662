"""A worker as a process: `python -m quire.executor.worker_main FD PARENT LASTING`.

Knows one socket and how to create the worker. When the process ends, it sends a last message with the reason, and it
never outlives its parent. One thread reads messages, so that the parent's writes never wait for a step. The main
thread handles the messages in order.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from quire.config.serialize import extend_path
from quire.errors import RankLost, StepFailed
from quire.executor.messages import (
    CallFailed,
    CallResult,
    CallWorker,
    Down,
    StartWorker,
    Up,
    WorkerProgress,
    WorkerStarted,
    call_failed,
    decode_down,
    encode,
    revive_callables,
    worker_ended,
)
from quire.processes.child import begin_child, exit_child
from quire.protocol.plan import StepPlan
from quire.startup_timer import Report


def read_into(inbox: SimpleQueue[Down], pipe: Connection) -> None:
    """Read until the parent closes its end or dies. Then end this process: it has nothing left to do."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(decode_down(pipe.recv_bytes()))
    os._exit(0)


def make_worker(start: StartWorker, report: Report) -> Any:
    """Create the worker."""
    extend_path(start.path)
    module, _, name = start.target.partition(":")
    return getattr(importlib.import_module(module), name)(start.payload, report)


def serve(inbox: SimpleQueue[Down], pipe: Connection) -> None:
    """Create the worker, then handle messages; an exception that is not caught ends the process."""
    start = inbox.get()
    if not isinstance(start, StartWorker):
        raise TypeError(f"{type(start).__name__} came before Start")

    def report(stage: str, share: float) -> None:
        if start.reports:
            pipe.send_bytes(encode(WorkerProgress(stage, share)))

    worker = make_worker(start, report)
    pipe.send_bytes(encode(WorkerStarted()))
    while True:
        message = inbox.get()
        answer = step(worker, message) if isinstance(message, StepPlan) else call(worker, message)
        pipe.send_bytes(answer)


def step(worker: Any, plan: StepPlan) -> bytes:
    try:
        result: Up = worker.run(plan).result()
    except StepFailed as error:
        result = call_failed(error)
    return encode(result)


def call(worker: Any, message: Down) -> bytes:
    """If the function fails, the caller gets its exception, and the worker goes on.

    Raises RankLost: another rank did not take part, so this one cannot go on.
    """
    if isinstance(message, CallFailed):
        return encode(message)
    if not isinstance(message, CallWorker):
        raise TypeError(f"{type(message).__name__} came after Start")
    try:
        return encode(CallResult(worker.call(message.name, *revive_callables(message.args))))
    except RankLost:
        raise
    except Exception as error:
        return encode(call_failed(error))


def main(fd: int, parent: int, lasting: bool) -> int:
    begin_child("worker", parent, lasting)
    # Linux divides a core between sessions, so ranks of one session would share one part of it.
    with contextlib.suppress(OSError):
        os.setsid()
    os.set_inheritable(fd, False)
    pipe = Connection(fd)
    inbox: SimpleQueue[Down] = SimpleQueue()
    threading.Thread(target=read_into, args=(inbox, pipe), name="reader", daemon=True).start()
    try:
        serve(inbox, pipe)
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(encode(worker_ended(error)))
    return 1


if __name__ == "__main__":
    exit_child(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"))
