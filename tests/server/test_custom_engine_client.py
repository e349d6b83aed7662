"""A server over a third kind of engine client: it uses only the interface `EngineClient`."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_core import ToldClient, make_tokenizer

from quire.api.async_llm import AsyncLLM
from quire.api.metrics import engine_stats
from quire.config.engine import EngineConfig
from quire.config.server import ServerConfig
from quire.engine.client import EngineClient
from quire.protocol.output import EngineStats
from quire.server.api_keys import ApiKeys
from quire.server.process import server_process, sockets

PATIENCE_S = 60.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


@pytest.fixture
def client(tmp_path: Path) -> ToldClient:
    make_tokenizer(tmp_path)
    made = ToldClient(tmp_path, "hello")
    made.resolved.__dict__.update(
        kv_dtype="float32", max_num_seqs=4, prefix_caching=True, max_num_batched_tokens=64
    )
    return made


@asynccontextmanager
async def served(
    client: EngineClient,
) -> AsyncIterator[tuple[server_process.ServerProcess, httpx.AsyncClient, asyncio.Task[int]]]:
    config = EngineConfig.from_keywords(
        model=client.resolved.path, served_model_name="toy", host="127.0.0.1", port=0
    )
    with sockets.bind(ServerConfig(host="127.0.0.1", port=0)) as listener:
        server = server_process.ServerProcess(config, listener, client, ApiKeys(config.server))
        running = asyncio.ensure_future(server.run())
        async with httpx.AsyncClient(base_url=server.url) as http:
            try:
                await until(lambda: has_status(http, "/health/startup", 200))
                yield server, http, running
            finally:
                server.stop(15)
                await asyncio.wait_for(running, PATIENCE_S)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def has_status(http: httpx.AsyncClient, path: str, status: int) -> bool:
    return (await http.get(path)).status_code == status


@in_loop
async def test_health_follows_the_state_of_the_client(client: ToldClient) -> None:
    async with served(client) as (_, http, _):
        body = {"model": "toy", "prompt": "a", "max_tokens": 4}
        answer = await http.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"]
        for condition, health, ready in (
            ("ready", 200, 200),
            ("restarting", 200, 503),
            ("delayed", 503, 503),
            ("ready", 200, 200),
        ):
            client.condition = condition
            assert await has_status(http, "/health", health), condition
            assert await has_status(http, "/health/ready", ready), condition


@in_loop
async def test_metrics_report_the_statistics_and_the_restarts_of_the_client(
    client: ToldClient,
) -> None:
    async with served(client) as (_, http, _):
        client.counted = EngineStats(running=3, num_blocks=7)
        assert "vllm:num_requests_running{" in (text := (await http.get("/metrics")).text)
        assert 'num_requests_running{engine="0",model_name="toy"} 3.0' in text
        assert 'process="engine"} 0.0' in text
        client.epoch = 2

        async def is_counted() -> bool:
            lines = (await http.get("/metrics")).text.splitlines()
            return any('process="engine"} 2.0' in line for line in lines)

        await until(is_counted)
    assert engine_stats(client).running == 3


@in_loop
async def test_the_server_ends_with_its_engine(
    client: ToldClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "DEATH_NOTICE_S", 0.0)
    async with served(client) as (_, _, running):
        client.condition = "dead"
        assert await asyncio.wait_for(running, PATIENCE_S) == 1


@in_loop
async def test_waiting_calls_do_not_block_the_call_that_ends_them(
    client: ToldClient,
) -> None:
    """(They took all threads of the event loop.)"""
    resumed = threading.Event()

    def call(name: str, *args: Any) -> Any:
        if name == "resume":
            resumed.set()
        return resumed.wait(PATIENCE_S)

    client.call = call  # type: ignore[method-assign]
    llm = AsyncLLM.from_client(client)
    waiting = [asyncio.ensure_future(llm.call("drained", str(number))) for number in range(80)]
    await asyncio.sleep(0)
    await asyncio.wait_for(llm.resume_generation(), PATIENCE_S)
    assert await asyncio.gather(*waiting) == [True] * 80
    llm.shutdown()
