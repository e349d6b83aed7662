"""SIGKILL of the engine under many streams: seconds until the engine is ready again, and until each stream has its next token."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import serving_cost
from benchmarks.kept.engines import Model
from quire.errors import StartupError
from quire.observe.process_memory import process_tree

PROMPT, LONGEST = 32, 2048
FEWEST = 3
"""Events that every stream has before the kill."""
PATIENCE_S = 120.0
ENGINE = "quire.engine.engine_main"


def measure(model: Model, streams: int, rounds: int, flags: list[str]) -> dict[str, Any]:
    words = [
        "env", "QUIRE_MAX_ENGINE_RESTARTS=100", sys.executable, "-m", "quire", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}",
        "--skip-tokenizer-init", "--max-num-seqs", str(streams), "--max-model-len", str(LONGEST), *flags,
    ]  # fmt: skip
    return asyncio.run(_measure(model, shlex.join(words), streams, rounds))


async def _measure(model: Model, command: str, streams: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"ready": [], "first token": [], "last stream": []}
    async with serving_cost.started("quire", command, model.path) as running:
        for number in range(rounds):
            ready, after = await _round(running, model.prompts(f"crash {number}", streams, PROMPT))
            found["ready"].append(ready)
            found["first token"].append(min(after))
            found["last stream"].append(max(after))
            await asyncio.sleep(0.5)  # the engine drops the requests
        return {"streams": streams, "start_s": running.start_seconds, "seconds": found}


async def _round(
    running: serving_cost.Running, prompts: list[list[int]]
) -> tuple[float, list[float]]:
    """Seconds from the kill until the engine is ready, and until each stream goes on."""
    times: list[list[float]] = [[] for _ in prompts]
    tasks = [
        asyncio.create_task(_follow(running, prompt, one))
        for prompt, one in zip(prompts, times, strict=True)
    ]
    try:
        await _until(lambda: all(len(one) >= FEWEST for one in times), "streams begin", tasks)
        killed = time.perf_counter()
        os.kill(engine_pid(running.process.pid), signal.SIGKILL)
        ready = await _ready(running) - killed
        await _until(lambda: all(_resumed(one, killed) for one in times), "streams go on", tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return ready, [_resumed(one, killed) - killed for one in times]


async def _follow(running: serving_cost.Running, prompt: list[int], times: list[float]) -> None:
    """Note when each piece of the stream arrives."""
    body = {
        "model": running.model, "prompt": prompt, "stream": True, "max_tokens": LONGEST - PROMPT, "temperature": 0.0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = await running.server.ask(
        "POST", "/v1/completions", msgspec.json.encode(body), on_piece=lambda _, when: times.append(when)
    )  # fmt: skip
    if answer.status != 200:
        raise StartupError(f"a stream ended: {answer.status} {answer.body[:300]!r}")


def _resumed(times: list[float], killed: float) -> float:
    """When the first piece after the pause came; 0: not yet. What was on its way comes within a moment of the kill."""
    gaps = [(later - when, later) for when, later in pairwise(times) if later > killed]  # fmt: skip
    pause, end = max(gaps, default=(0.0, 0.0))
    return end if pause > 0.2 else 0.0


async def _ready(running: serving_cost.Running) -> float:
    """When the server says again that it is ready, after it has noticed the death."""
    noticed, end = False, time.perf_counter() + PATIENCE_S
    while time.perf_counter() < end:
        status = (await running.server.ask("GET", "/health/ready", timeout=10)).status
        if status == 200 and noticed:
            return time.perf_counter()
        noticed |= status != 200
        await asyncio.sleep(0.01)
    raise StartupError("the engine is not ready again")


async def _until(reached: Any, what: str, tasks: list[asyncio.Task[None]]) -> None:
    end = time.perf_counter() + PATIENCE_S
    while not reached():
        for task in tasks:
            if task.done():
                task.result()
        if time.perf_counter() > end:
            raise StartupError(f"not in time: {what}")
        await asyncio.sleep(0.02)


def engine_pid(server: int) -> int:
    for pid in process_tree(server):
        if ENGINE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise StartupError("the server has no engine process")
