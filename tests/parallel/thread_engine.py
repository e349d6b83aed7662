"""An engine whose ranks are threads of this process: the real group of workers, plans as bytes, without the start of processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from equality.engines import Engine, engine

from quire.config.engine import Resolved
from quire.engine import build
from quire.engine.enabled_features import enabled_features
from quire.executor.messages import decode_down, decode_up
from quire.executor.multiproc_executor import MultiprocExecutor
from quire.executor.worker_main import call, step
from quire.features.lora import memory
from quire.ops.cpu.bindings import best
from quire.parallel.layout import RankLayout
from quire.parallel.rank_address import RankAddress, addresses
from quire.parallel.ranks import RankGroups
from quire.parallel.stage_sockets import StageSockets
from quire.protocol.plan import StepPlan
from quire.worker import build as worker_build
from tests.parallel.stages import own_sockets
from tests.parallel.thread_ranks import ThreadRanks

LOCK = threading.RLock()
"""torch's default dtype, which the construction of a model sets, belongs to all threads."""


class ThreadAddress:
    """See `RankAddress` (parallel/rank_address.py)."""

    def __init__(self, rank: int, layout: RankLayout, ranks: RankGroups):
        self.rank, self.layout, self.place, self.ranks = rank, layout, ranks.place, ranks
        self.local = rank, layout.size

    def join(self) -> RankGroups:
        return self.ranks


def thread_addresses(layout: RankLayout) -> list[ThreadAddress]:
    """Of all ranks: stages are connected by sockets; without kernels, ranks that split layers exchange through a list."""
    groups: dict[tuple[int, ...], tuple[list[Any], threading.Barrier]] = {}
    found = []
    with addresses(layout) as shared:
        for rank in range(layout.size):
            place, fd, tensor = layout.place(rank), -1, None
            if layout.tensor > 1 and best() is not None:
                fd = os.dup(shared[rank].fd)
            elif layout.tensor > 1:
                new = [None] * layout.tensor, threading.Barrier(layout.tensor, timeout=120)
                group = groups.setdefault(tuple(layout.tensor_group(rank)), new)
                tensor = ThreadRanks(place.tensor, layout.tensor, *group)
            ranks = RankAddress(rank, layout, fd, own_sockets(shared[rank])).join()
            found.append(ThreadAddress(rank, layout, replace(ranks, tensor=ranks.tensor or tensor)))
    return found


class ThreadMember:
    """A rank's worker in a thread of its own; see `RankProcess`, of which a group uses these methods."""

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

    def is_stopped(self) -> bool:
        return False

    def look(self, number: int, seconds: float = 0.0) -> Any:
        return decode_up(self.sent[number].result(120))

    answer = look

    def cause_of_end(self) -> None:
        """Threads end with the test."""

    def lost(self) -> str:
        return ""

    def close(self) -> None:
        self.thread.shutdown(wait=False)


class ThreadGroup(MultiprocExecutor):
    """A group of threads."""

    def __init__(self, resolved: Resolved):
        layout = RankLayout.of(resolved.config.parallel)
        self.answering, self._on_end = layout.answering, lambda stopped: None
        self.addresses = thread_addresses(layout)
        self.members: list[Any] = [
            ThreadMember(lambda own=own: self._make(resolved, own)) for own in self.addresses
        ]
        for member in self.members:
            member.started.result()

    def _make(self, resolved: Resolved, address: ThreadAddress) -> Any:
        features = enabled_features(resolved)
        try:
            return worker_build.build_worker(resolved, features, address=address)  # type: ignore[arg-type]
        except BaseException:
            self.leave()
            raise

    def close(self) -> None:
        super().close()
        self.leave()

    def leave(self) -> None:
        """Let no rank wait for another."""
        for each in self.addresses:
            if isinstance(tensor := each.ranks.tensor, ThreadRanks):
                tensor.barrier.abort()
            if isinstance(link := each.ranks.stages, StageSockets):
                link.close()

    @property
    def workers(self) -> list[Any]:
        return [member.worker for member in self.members]


@contextmanager
def split_engine(
    path: str, size: int = 2, depth: int | None = None, pipeline: int = 1, **settings: Any
) -> Iterator[Engine]:
    """As `engine`, with `pipeline` stages of `size` ranks; 1 and 1: without ranks."""
    if size * pipeline == 1:
        with engine(path, depth, **settings) as one:
            yield one
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_executor", lambda resolved, *_: ThreadGroup(resolved))
        patch.setattr(worker_build, "bind_to_cores", lambda *_: [])
        for name in ("build_models", "forecast_specs", "plan_memory", "plan_on"):
            patch.setattr(worker_build, name, locked(getattr(worker_build, name)))
        patch.setattr(memory, "adapter_targets", locked(memory.adapter_targets))
        sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": pipeline}
        with engine(path, depth, **sizes, **settings) as one:
            yield one


def locked(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **keywords: Any) -> Any:
        with LOCK:
            return function(*args, **keywords)

    return run
