"""Threads that decode, render and tokenize long texts, with a fair share for every client.

Knows jobs, their sizes and their clients. Does not know what a job does.

    run(job) -> queue of its client -> a thread, when the client and the job's size may have one -> result

Clients take turns. Neither one client nor long jobs can occupy all threads, so a short text of another client starts
at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from quire.server.errors import ApiError

P = ParamSpec("P")
T = TypeVar("T")

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""The client of the current request: its key, or its address if no key is needed."""

MOST_THREADS = 4  # more would only compete for the GIL
LONG_JOB = 1 << 20  # bytes: such a job takes about a second
MOST_WAITING = 256 << 20  # bytes of waiting jobs, of all clients
MOST_WAITING_OF_ONE = 128 << 20  # ... of one client
MOST_JOBS_OF_ONE = 1024  # waiting jobs of one client


@dataclass(slots=True)
class Job:
    call: Callable[[], Any]
    size: int
    client: str
    context: Context
    future: Future[Any] = field(default_factory=Future)


class TokenizerPool:
    """At least two threads, so that neither one client nor long jobs can occupy all."""

    def __init__(self, threads: int | None = None):
        self.threads = max(2, threads or min(MOST_THREADS, os.cpu_count() or 1))
        self._executor = ThreadPoolExecutor(self.threads, "text")
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._waiting: dict[str, list[Job]] = {}
        """Waiting jobs by client. The first client gets the next thread."""
        self._bytes: Counter[str] = Counter()
        """Bytes of the waiting jobs, by client."""
        self._running: Counter[str] = Counter()
        self._long = 0
        """Number of running long jobs."""

    @property
    def inside(self) -> bool:
        """Whether the current thread is one of the pool's."""
        return getattr(self._inside, "job", False)

    async def run(self, call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Run a short job."""
        return await self.run_sized(0, call, *args, **keywords)

    async def run_sized(
        self, size: int, call: Callable[P, T], *args: P.args, **keywords: P.kwargs
    ) -> T:
        """Run a job over `size` bytes. A thread of the pool runs it directly.

        Raises:
            ApiError: 429: too many jobs of this client wait; 503: too many of all clients.
        """
        if self.inside:
            return call(*args, **keywords)
        job = Job(partial(call, *args, **keywords), size, CLIENT.get(), copy_context())
        future = job.future  # the job drops it when it ends, perhaps before this thread goes on
        with self._lock:
            self._add(job)
        self._start()
        try:
            result: T = await asyncio.wrap_future(future)
            return result
        finally:
            del job, future  # they refer to the error, and the error to this frame

    def _add(self, job: Job) -> None:
        jobs = self._waiting.get(job.client, [])
        size = self._bytes[job.client] + job.size
        if jobs and (size > MOST_WAITING_OF_ONE or len(jobs) >= MOST_JOBS_OF_ONE):
            raise ApiError(
                429,
                f"{len(jobs)} requests of this client wait to be tokenized, with {size >> 20} MiB (the limits are"
                f" {MOST_JOBS_OF_ONE} and {MOST_WAITING_OF_ONE >> 20} MiB); send fewer long texts at once",
                headers={"Retry-After": "2"},
            )
        if self._waiting and self._bytes.total() + job.size > MOST_WAITING:
            raise ApiError(
                503,
                f"texts of {MOST_WAITING >> 20} MiB are waiting to be tokenized; try again later",
                headers={"Retry-After": "2"},
            )
        self._waiting.setdefault(job.client, []).append(job)
        self._bytes[job.client] += job.size

    def _start(self) -> None:
        """Start jobs on free threads."""
        with self._lock:
            while (job := self._next()) is not None:
                self._running[job.client] += 1
                self._long += job.size > LONG_JOB
                self._executor.submit(self._work, job)

    def _next(self) -> Job | None:
        """The shortest job of the first client that may run one; this client becomes the last."""
        if self._running.total() >= self.threads:
            return None
        for client, jobs in list(self._waiting.items()):
            if self._running[client] >= self.threads - 1:
                continue
            job = min(jobs, key=lambda job: job.size)
            if job.size > LONG_JOB and self._long >= self.threads - 1:
                continue
            del self._waiting[client]
            jobs.remove(job)
            self._bytes[client] -= job.size
            if jobs:
                self._waiting[client] = jobs
            else:
                del self._bytes[client]
            return job
        return None

    def _work(self, job: Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            self._ended(job)
            return
        self._inside.job = True
        try:
            tell = partial(job.future.set_result, job.context.run(job.call))
        except BaseException as error:
            tell = partial(job.future.set_exception, error)
        self._inside.job = False
        self._ended(job)
        tell()
        if job.size > LONG_JOB:
            give_back()
        # An error refers to this frame and its callers. If they referred to the error, everything of the job would stay
        # until the next garbage collection.
        del job.future, job.call, tell

    def _ended(self, job: Job) -> None:
        with self._lock:
            self._running[job.client] -= 1
            if not self._running[job.client]:
                del self._running[job.client]
            self._long -= job.size > LONG_JOB
        self._start()


def run_alone(work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **keywords: P.kwargs) -> T:
    """The result of `work`, run in an event loop of this thread. For a job of the pool.

    asyncio.run alone keeps an error, and all that its frames refer to, until the next garbage collection.
    """

    async def caught() -> tuple[Any, BaseException | None]:
        try:
            return await work(*args, **keywords), None
        except Exception as error:
            return None, error

    outcome, error = asyncio.run(caught())
    try:
        if error is not None:
            raise error
        result: T = outcome
        return result
    finally:
        del error


def give_back() -> None:
    """Return freed memory to the system: the tokenizer takes about eighty bytes for each byte of a text."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return None
