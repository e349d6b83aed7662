"""Threads for long texts: they are decoded, rendered and tokenized there, and every client gets a fair share.

Knows jobs, their sizes and which client each belongs to. Does not know what a job does.

    run(job) -> queue of its client -> a thread, when the client and the job's size may have one -> result

Clients take turns. One client never has all threads, and long jobs never have all threads, so a short text of
another client starts at once.
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
"""The client that the current request belongs to: its key, or its address where no key is needed."""

MOST_THREADS = 4  # more would only compete for the interpreter's lock
LONG_JOB = 1 << 20  # bytes: from here on a job takes about a second
MOST_WAITING = 256 << 20  # bytes of jobs that wait, of all clients
MOST_WAITING_OF_ONE = 128 << 20  # ... of one client
MOST_JOBS_OF_ONE = 1024  # jobs of one client that wait


@dataclass(slots=True)
class Job:
    call: Callable[[], Any]
    size: int
    client: str
    context: Context
    future: Future[Any] = field(default_factory=Future)


class TextPool:
    """At least two threads, so that one client, or one kind of job, cannot have them all."""

    def __init__(self, threads: int | None = None):
        self.threads = max(2, threads or min(MOST_THREADS, os.cpu_count() or 1))
        self._executor = ThreadPoolExecutor(self.threads, "text")
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._waiting: dict[str, list[Job]] = {}
        """Jobs by client. The first client is the next one to get a thread."""
        self._bytes: Counter[str] = Counter()
        """Of the jobs that wait."""
        self._running: Counter[str] = Counter()
        self._long = 0
        """Long jobs that run."""

    @property
    def inside(self) -> bool:
        """Whether this thread is one of the pool's."""
        return getattr(self._inside, "job", False)

    async def run(self, call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """The result of a short job."""
        return await self.run_sized(0, call, *args, **keywords)

    async def run_sized(
        self, size: int, call: Callable[P, T], *args: P.args, **keywords: P.kwargs
    ) -> T:
        """The result of a job over `size` bytes. A thread of the pool does it itself.

        Raises:
            ApiError: 429: too many jobs of this client wait; 503: too many of all.
        """
        if self.inside:
            return call(*args, **keywords)
        job = Job(partial(call, *args, **keywords), size, CLIENT.get(), copy_context())
        with self._lock:
            self._add(job)
        self._start()
        try:
            result: T = await asyncio.wrap_future(job.future)
            return result
        finally:
            del job  # it knows the error, and the error this frame

    def _add(self, job: Job) -> None:
        jobs = self._waiting.get(job.client, [])
        size = self._bytes[job.client] + job.size
        if jobs and (size > MOST_WAITING_OF_ONE or len(jobs) >= MOST_JOBS_OF_ONE):
            raise ApiError(
                429,
                f"{len(jobs)} requests of this client wait to be read, with {size >> 20} MiB (the limits are"
                f" {MOST_JOBS_OF_ONE} and {MOST_WAITING_OF_ONE >> 20} MiB); send fewer long texts at once",
                headers={"Retry-After": "2"},
            )
        if self._waiting and self._bytes.total() + job.size > MOST_WAITING:
            raise ApiError(
                503,
                f"long texts of {MOST_WAITING >> 20} MiB wait to be read already; try again",
                headers={"Retry-After": "2"},
            )
        self._waiting.setdefault(job.client, []).append(job)
        self._bytes[job.client] += job.size

    def _start(self) -> None:
        """Give free threads to jobs that may have one."""
        with self._lock:
            while (job := self._next()) is not None:
                self._running[job.client] += 1
                self._long += job.size > LONG_JOB
                self._executor.submit(self._work, job)

    def _next(self) -> Job | None:
        """The shortest job of the first client that may run one; that client is the last one then."""
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
        # An error knows this frame and its callers: with a way back from them to the error, all that the job held would
        # stay until the next collection.
        del job.future, job.call, tell

    def _ended(self, job: Job) -> None:
        with self._lock:
            self._running[job.client] -= 1
            if not self._running[job.client]:
                del self._running[job.client]
            self._long -= job.size > LONG_JOB
        self._start()


def run_alone(work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **keywords: P.kwargs) -> T:
    """The result of `work`, run by an event loop of this thread. For a job of the pool.

    asyncio.run by itself keeps an error, and all that its frames hold, until the next collection.
    """

    async def caught() -> tuple[Any, BaseException | None]:
        try:
            return await work(*args, **keywords), None
        except Exception as error:
            return None, error

    found, error = asyncio.run(caught())
    try:
        if error is not None:
            raise error
        result: T = found
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
