"""Measures how long one callback holds the event loop, and sends an application the bodies that would make it long.

CPU time of the loop's thread counts, not wall time: other work on the machine does not lengthen it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asgi import DIRECT
from scripted import make_state
from scripted_core import ToldClient, make_tokenizer, told_engine

from quire.errors import EngineDeadError
from quire.protocol.output import EngineOutput
from quire.server.app import QuireApp, build_app

LIMIT_S = 0.1
"""No callback may hold the loop longer."""
MOST_BODY = 16 << 20


@dataclass
class Held:
    """The longest callback so far."""

    seconds: float = 0.0
    name: str = ""

    def add(self, seconds: float, name: str) -> None:
        if seconds > self.seconds:
            self.seconds, self.name = seconds, name


@contextmanager
def longest_callback() -> Iterator[Held]:
    """Times every callback of the loop that runs in this thread (asyncio's own loop only: uvloop has no `Handle._run`)."""
    held, run, thread = Held(), asyncio.Handle._run, threading.get_ident()

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        call = handle._callback  # type: ignore[attr-defined]
        task = getattr(call, "__self__", None)
        coroutine = task.get_coro() if isinstance(task, asyncio.Task) else call
        name = getattr(coroutine, "__qualname__", type(coroutine).__name__)
        start = time.thread_time()
        run(handle)
        held.add(time.thread_time() - start, name)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield held
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


@dataclass
class Beats:
    """CPU time of the process between two wake-ups of a thread that only sleeps: a C call that keeps the GIL
    lengthens it, and other processes do not."""

    seconds: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        last = time.process_time()
        while not self._stop.wait(0.002):
            now = time.process_time()
            self.seconds = max(self.seconds, now - last)
            last = now

    def __enter__(self) -> Beats:
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


@dataclass
class Answer:
    status: int
    body: bytes
    held: Held
    """The loop, by this request's longest callback."""
    gap: float
    """CPU seconds of the process for which no other Python thread could run."""

    def json(self) -> Any:
        return json.loads(self.body)


def post(folder: Path, path: str, raw: bytes, client: str = "127.0.0.1", **config: Any) -> Answer:
    """One request to a new application, with the real frontend over an engine with a fixed text."""
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(folder)

    async def go() -> Answer:
        engine, below = told_engine(folder, "so be it", 4)
        below.outputs = lambda: all_of(below)
        state = make_state(None, **{"tool_call_parser": "hermes", **config})
        state.attach(engine)
        app = build_app(state)
        try:
            await send(app, "/tokenize", b'{"prompt":"warm"}', client)  # imports, caches
            gc.collect()
            with longest_callback() as held, Beats() as beats:
                # In a task of its own: the step of this one began before the clock.
                status, body = await asyncio.ensure_future(send(app, path, raw, client))
                for _ in range(20):
                    await asyncio.sleep(0)
            return Answer(status, body, held, beats.seconds)
        finally:
            below.close()

    return asyncio.run(go())


def all_of(client: ToldClient) -> list[EngineOutput]:
    """What an engine says of many requests after one step, at most 256 outputs, as large batches are."""
    found = [client.spoken.get()]
    with suppress(queue.Empty):
        while len(found) < 256:
            found.append(client.spoken.get_nowait())
    known = [output for output in found if output is not None and output.id not in client.aborted]
    if None in found:
        raise EngineDeadError("shut down")
    return known


async def send(
    app: QuireApp, path: str, raw: bytes, client: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """The status and the body of one answer."""
    scope = {
        **DIRECT, "path": path, "raw_path": path.encode(), "client": (client, 1),
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))],
    }  # fmt: skip
    parts = [raw[at : at + (1 << 18)] for at in range(0, len(raw), 1 << 18)] or [b""]
    status, found, ended = 0, [], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if parts:
            body = parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(parts)}
        await ended.wait()
        return {"type": "http.disconnect"}

    async def take(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            found.append(message.get("body", b""))

    await app(scope, receive, take)
    ended.set()
    return status, b"".join(found)


def many(item: bytes, size: int = MOST_BODY, start: bytes = b"[", end: bytes = b"]") -> bytes:
    """As many of `item` as `size` bytes hold, as a JSON list."""
    count = max(1, (size - 200) // (len(item) + 1))
    return start + b",".join([item] * count) + end


def members(key: Callable[[int], str], value: bytes, size: int) -> bytes:
    """Members of an object, without its braces, as many as `size` bytes hold."""
    found, total, at = [], 0, 0
    while total < size - 200:
        found.append(b'"%s":%s' % (key(at).encode(), value))
        total += len(found[-1]) + 1
        at += 1
    return b",".join(found)
