"""An engine whose ranks are threads of this process: the real group of workers, plans as bytes, without the start of processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from equality.engines import Engine, engine

from quire.config.engine import Resolved
from quire.engine import build
from quire.executor.group import GroupExecutor
from quire.executor.messages import decode_down, decode_up
from quire.executor.worker_process import call, step
from quire.ops.cpu.bindings import best
from quire.parallel.address import addresses
from quire.parallel.ranks import TensorRanks
from quire.parallel.shared_memory import SharedMemoryRanks
from quire.protocol.plan import StepPlan
from quire.worker import build as worker_build
from tests.parallel.thread_ranks import ThreadRanks

LOCK = threading.RLock()
"""torch's default dtype, which the construction of a model sets, is that of all threads."""


class ThreadAddress:
    """See `RankAddress` (parallel/address.py)."""

    def __init__(self, ranks: TensorRanks):
        self.rank, self.size, self.ranks = ranks.rank, ranks.size, ranks

    def join(self) -> TensorRanks:
        return self.ranks


class ThreadMember:
    """A rank's worker in a thread of its own; see `ProcessExecutor`, of which a group uses these methods."""

    def __init__(self, make: Callable[[], Any]):
        self.thread = ThreadPoolExecutor(1)
        self.started = self.thread.submit(make)
        self.sent: list[Future[bytes]] = []
        self.process = SimpleNamespace(poll=lambda: None, kill=self.close, wait=lambda timeout: 0)

    @property
    def worker(self) -> Any:
        return self.started.result()

    def request(self, message: bytes) -> int:
        decoded = decode_down(message)
        handle = step if isinstance(decoded, StepPlan) else call
        self.sent.append(self.thread.submit(handle, self.worker, decoded))
        return len(self.sent) - 1

    def answer(self, number: int) -> Any:
        return decode_up(self.sent[number].result(120))

    def close(self) -> None:
        self.thread.shutdown(wait=False)


class ThreadGroup(GroupExecutor):
    """A group of threads."""

    def __init__(self, resolved: Resolved):
        size = resolved.config.parallel.tensor_parallel_size
        slots: list[Any] = [None] * size
        barrier = threading.Barrier(size, timeout=120)
        self._dead, self.barrier = None, barrier
        ranks: list[Any] = [ThreadRanks(rank, size, slots, barrier) for rank in range(size)]
        if best() is not None:  # then kernels exchange, too
            with addresses(size) as found:
                fds = [os.dup(each.fd) for each in found]
            ranks = [SharedMemoryRanks(fd, rank, size, 120, 120) for rank, fd in enumerate(fds)]
        self.members: list[Any] = [
            ThreadMember(lambda own=own: self._make(resolved, own)) for own in ranks
        ]
        for member in self.members:
            member.started.result()

    def _make(self, resolved: Resolved, ranks: TensorRanks) -> Any:
        features = build.worker_features(resolved, build.build_compiler(resolved))
        specs, address = build.draft_specs(resolved), ThreadAddress(ranks)
        try:
            return worker_build.build_worker(resolved, features, specs, address=address)  # type: ignore[arg-type]
        except BaseException:
            self.barrier.abort()
            raise

    @property
    def workers(self) -> list[Any]:
        return [member.worker for member in self.members]


@contextmanager
def split_engine(
    path: str, size: int = 2, depth: int | None = None, **settings: Any
) -> Iterator[Engine]:
    """As `engine`, with `size` ranks; 1: without ranks."""
    if size == 1:
        with engine(path, depth, **settings) as one:
            yield one
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_executor", lambda resolved, *_: ThreadGroup(resolved))
        patch.setattr(worker_build, "bind_to_cores", lambda *_: [])
        for name in ("build_models", "plan_memory", "plan_on"):
            patch.setattr(worker_build, name, locked(getattr(worker_build, name)))
        with engine(path, depth, tensor_parallel_size=size, **settings) as one:
            yield one


def locked(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **keywords: Any) -> Any:
        with LOCK:
            return function(*args, **keywords)

    return run
