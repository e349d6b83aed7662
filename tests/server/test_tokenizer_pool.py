"""Threads for long texts: clients take turns, and neither one client nor long jobs have all threads."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from loop_monitor import send
from scripted import make_state
from scripted_core import make_tokenizer, told_engine

from quire.frontend.tokenizer import Tokenizer
from quire.server import tokenizer_pool
from quire.server.app import build_app
from quire.server.errors import ApiError
from quire.server.tokenizer_pool import CLIENT, LONG_JOB, TokenizerPool, run_alone

PATIENCE_S = 60


class Gate:
    """Jobs that wait until they are let go, and what order they began in."""

    def __init__(self) -> None:
        self.open, self.begun = threading.Event(), []

    def job(self, name: str, waits: bool = True) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self.open.wait(PATIENCE_S) or not waits
            return name

        return run

    async def has_begun(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.begun) < count:
                await asyncio.sleep(0.005)


def asked(
    pool: TokenizerPool, client: str, job: Callable[[], str], size: int = 0
) -> asyncio.Task[str]:
    CLIENT.set(client)
    return asyncio.ensure_future(pool.run_sized(size, job))


def run(work: Callable[[TokenizerPool, Gate], Coroutine[Any, Any, None]], threads: int = 2) -> None:
    async def go() -> None:
        await work(TokenizerPool(threads), Gate())

    asyncio.run(go())


def test_one_client_never_has_all_threads():
    async def work(pool: TokenizerPool, gate: Gate) -> None:
        greedy = [asked(pool, "greedy", gate.job("greedy")) for _ in range(50)]
        await gate.has_begun(1)
        other = asked(pool, "other", gate.job("other"))
        await gate.has_begun(2)  # while the greedy client's first job still runs, and 49 wait
        assert gate.begun == ["greedy", "other"]
        gate.open.set()
        await asyncio.gather(other, *greedy)

    run(work)


def test_clients_are_served_round_robin():
    async def work(pool: TokenizerPool, gate: Gate) -> None:
        block = [asked(pool, name, gate.job("block")) for name in ("x", "y")]
        await gate.has_begun(2)
        waiting = [asked(pool, "a", gate.job("a")) for _ in range(10)]
        waiting += [asked(pool, "b", gate.job("b")) for _ in range(2)]
        waiting += [asked(pool, "c", gate.job("c"))]
        await asyncio.sleep(0.01)
        gate.open.set()
        await asyncio.gather(*block, *waiting)
        assert max(map(gate.begun.index, ("a", "b", "c"))) <= 5  # not after the ten

    run(work)


def test_a_job_may_end_before_its_caller_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    start, run_job, ended = TokenizerPool._start, TokenizerPool._work, threading.Event()

    def start_and_wait(self: TokenizerPool) -> None:
        start(self)
        if threading.current_thread() is threading.main_thread():
            assert ended.wait(PATIENCE_S)

    def run_to_end(self: TokenizerPool, job: tokenizer_pool.Job) -> None:
        run_job(self, job)
        ended.set()

    monkeypatch.setattr(TokenizerPool, "_start", start_and_wait)
    monkeypatch.setattr(TokenizerPool, "_work", run_to_end)

    async def work(pool: TokenizerPool, gate: Gate) -> None:
        assert await pool.run(str, 7) == "7"

    run(work)


def test_long_jobs_never_have_all_threads_and_short_ones_go_first():
    async def work(pool: TokenizerPool, gate: Gate) -> None:
        long = [asked(pool, name, gate.job("long"), 8 * LONG_JOB) for name in "abc" for _ in range(4)]  # fmt: skip
        await gate.has_begun(1)
        short = asked(pool, "d", gate.job("short"), 100)
        await gate.has_begun(2)
        assert gate.begun == ["long", "short"]
        gate.open.set()
        await asyncio.gather(short, *long)

    run(work)


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch):
    async def work(pool: TokenizerPool, gate: Gate) -> None:
        first = asked(pool, "a", gate.job("a"), 1000)
        await gate.has_begun(1)
        waiting = [asked(pool, "a", gate.job("a"), 400) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as caught:
            await asked(pool, "a", gate.job("a"), 400)
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "2")
        second = asked(pool, "b", gate.job("b"), 300)
        await gate.has_begun(2)
        waiting.append(asked(pool, "b", gate.job("b"), 700))
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as caught:
            await asked(pool, "c", gate.job("c"), 300)
        assert caught.value.status == 503
        gate.open.set()
        await asyncio.gather(first, second, *waiting)
        assert not pool._waiting
        assert not pool._running.total()
        assert not pool._bytes.total()

    monkeypatch.setattr(tokenizer_pool, "MOST_WAITING_OF_ONE", 1000)
    monkeypatch.setattr(tokenizer_pool, "MOST_WAITING", 1600)
    run(work)


def test_a_failed_or_cancelled_job_frees_its_thread():
    def fail() -> str:
        raise ValueError("no")

    async def work(pool: TokenizerPool, gate: Gate) -> None:
        for _ in range(5):
            with pytest.raises(ValueError, match="no"):
                await asked(pool, "a", fail)
        running = asked(pool, "a", gate.job("a"))
        await gate.has_begun(1)
        waits = asked(pool, "a", gate.job("given up"))
        await asyncio.sleep(0.01)
        waits.cancel()
        await asyncio.wait([waits])
        gate.open.set()
        assert await running == "a"
        assert await asked(pool, "a", gate.job("next")) == "next"
        assert gate.begun == ["a", "next"]

    run(work)


@pytest.mark.parametrize("by_loop", [False, True])
def test_a_failed_job_frees_its_memory_at_once(by_loop: bool):
    """A refused body of many MiB used to stay until the next collection: its error and a frame held each other."""

    class Body:
        pass

    held: list[weakref.ref[Body]] = []

    async def refuse_soon(body: Body) -> str:
        await asyncio.sleep(0)
        return refuse(body)

    def refuse(body: Body) -> str:
        raise ApiError(400, f"{body} is too much")

    async def once(pool: TokenizerPool) -> None:
        body = Body()
        held.append(weakref.ref(body))
        if by_loop:
            await pool.run_sized(0, run_alone, refuse_soon, body)
        else:
            await pool.run_sized(0, refuse, body)

    async def work(pool: TokenizerPool, gate: Gate) -> None:
        for _ in range(5):
            with suppress(ApiError):
                await once(pool)
        async with asyncio.timeout(
            PATIENCE_S
        ):  # the thread ends its job a little after it told the result
            while any(one() is not None for one in held):
                await asyncio.sleep(0.005)

    gc.disable()
    try:
        run(work)
    finally:
        gc.enable()
    assert len(held) == 5


def test_a_job_inside_a_thread_of_the_pool_needs_no_other_one():
    async def work(pool: TokenizerPool, gate: Gate) -> None:
        gate.open.set()

        def outer() -> str:
            return asyncio.run(pool.run(gate.job("inner")))

        found = await asyncio.gather(*(asked(pool, "a", outer) for _ in range(8)))
        assert found == ["inner"] * 8

    run(work)


def test_long_texts_of_one_client_do_not_delay_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Twelve long /tokenize of one client used to take every thread; a structured request waited for them."""
    make_tokenizer(tmp_path)
    gate, encode = threading.Event(), Tokenizer.encode

    def slow(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 100_000:
            assert gate.wait(PATIENCE_S)
            text = text[:100]
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def go() -> None:
        engine, below = told_engine(tmp_path, "x", 4)
        state = make_state(None)
        state.attach(engine)
        app = build_app(state)
        long = b'{"prompt":"%s"}' % (b"word " * 40_000)
        greedy = [asyncio.ensure_future(send(app, "/tokenize", long, "10.0.0.1")) for _ in range(12)]  # fmt: skip
        structured = b'{"prompt":"hi","max_tokens":2,"guided_choice":["yes","no"]}'
        fits = b'{"prompt":"%s"}' % (b"word " * 15_000)  # long enough for a thread
        async with asyncio.timeout(PATIENCE_S):
            for body in (structured, fits):
                path = "/v1/completions" if body is structured else "/tokenize"
                status, _ = await send(app, path, body, "10.0.0.2")
                assert status == 200
        assert not any(task.done() for task in greedy)
        gate.set()
        assert {status for status, _ in await asyncio.gather(*greedy)} == {200}
        below.close()

    asyncio.run(go())


def test_a_text_that_cannot_fit_is_not_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_tokenizer(tmp_path)
    sizes: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, add_special_tokens)

    async def go(path: str, body: bytes) -> tuple[int, bytes]:
        engine, below = told_engine(tmp_path, "x", 4)
        state = make_state(None)
        state.attach(engine)
        monkeypatch.setattr(Tokenizer, "encode", noted)
        try:
            return await send(build_app(state), path, body)
        finally:
            below.close()

    text = b"word " * (3 << 20)
    chat = b'{"messages":[{"role":"user","content":"%s"}]}' % text
    for path, body in (("/v1/completions", b'{"prompt":"%s"}' % text), ("/v1/chat/completions", chat), ("/tokenize", b'{"prompt":"%s"}' % text)):  # fmt: skip
        status, answer = asyncio.run(go(path, body))
        assert status == 400
        assert b"input_tokens" in answer
    assert max(sizes, default=0) < 100_000
