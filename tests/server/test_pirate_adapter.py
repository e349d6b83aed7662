"""The embedded pirate adapter over HTTP, with a real engine: loaded, used beside the model, read again, unloaded while it runs."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from asgi import browser, frames
from safetensors.torch import load_file, save_file
from scripted import make_state

from quire.api.async_engine import AsyncEngine
from quire.config.from_keywords import engine_config
from quire.engine.build import make_client
from quire.server.state import ServerState

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PIRATE = "quire-tiny-pirate-lora"
FILES = Path(__file__).parents[2] / "src" / "quire" / "embedded" / PIRATE
WHO = {
    "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 6, "ignore_eos": True,
}  # fmt: skip
Run = Callable[[Callable[["Server"], Coroutine[Any, Any, None]]], None]


class Server:
    def __init__(self, state: ServerState, http: httpx.AsyncClient):
        self.state, self.http = state, http

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def load(self, path: str = PIRATE, name: str = "pirate", **more: Any) -> httpx.Response:
        return await self.post(LOAD, lora_name=name, lora_path=path, **more)

    async def unload(self, name: str = "pirate") -> httpx.Response:
        return await self.post(UNLOAD, lora_name=name)

    async def ask(self, model: str = "quire-tiny", **more: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **{**WHO, **more}, model=model)

    async def text(self, model: str = "quire-tiny", **more: Any) -> str:
        answer = await self.ask(model, **more)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def names(self) -> list[str]:
        return [card["id"] for card in (await self.http.get("/v1/models")).json()["data"]]


@pytest.fixture(scope="module")
def serve() -> Iterator[Run]:
    """Runs a test against one server; no adapter is left behind."""
    config = engine_config(
        {"model": "quire-tiny", "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3,
         "max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20}
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as loop:
        patch.setenv("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "1")
        engine = AsyncEngine(make_client(config), config)

        async def started() -> Server:
            state = make_state(None, model="quire-tiny", served_model_name="quire-tiny", enable_lora=True)  # fmt: skip
            state.attach(engine)
            await engine.listen()
            return Server(state, browser(state))

        server = loop.run(started())

        def run(test: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
            loop.run(test(server))

        yield run
        loop.run(server.http.aclose())
        engine.shutdown()


@pytest.fixture
def other(tmp_path: Path) -> str:
    """The pirate's files with B = 0: an adapter that changes nothing."""
    shutil.copytree(FILES, tmp_path / "other")
    file = tmp_path / "other" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: torch.zeros_like(t) if "lora_B" in n else t for n, t in tensors.items()}, file)
    return str(tmp_path / "other")


def test_the_model_of_a_request_decides(serve: Run) -> None:
    async def test(on: Server) -> None:
        base = await on.text()
        assert (await on.ask("pirate")).status_code == 404
        assert (await on.load()).status_code == 200
        pirate = await on.text("pirate")
        assert pirate.startswith("Arr")
        assert not base.startswith("Arr")
        mixed = await asyncio.gather(*(on.text(("quire-tiny", "pirate")[n % 2]) for n in range(8)))
        assert mixed == [base, pirate] * 4
        assert await on.names() == ["quire-tiny", "pirate"]
        text = (await on.http.get("/metrics")).text
        assert 'vllm:lora_requests_info{max_lora="2"' in text
        assert (await on.unload()).status_code == 200
        assert (await on.ask("pirate")).status_code == 404
        assert await on.text() == base

    serve(test)


def test_reading_again_gives_the_new_weights(serve: Run, other: str) -> None:
    async def test(on: Server) -> None:
        base = await on.text()
        await on.load()
        pirate = await on.text("pirate")
        assert "load_inplace" in (await on.load(other)).json()["error"]["message"]
        assert (await on.load(other, load_inplace=True)).status_code == 200
        assert await on.text("pirate") == base  # not from the cache of the old weights
        assert (await on.load(load_inplace=True)).status_code == 200
        assert await on.text("pirate") == pirate
        await on.unload()

    serve(test)


def test_requests_go_on_after_their_adapter_is_unloaded(serve: Run) -> None:
    async def test(on: Server) -> None:
        await on.load()
        whole = await on.text("pirate", max_tokens=40)
        pieces, statuses = [], []
        body = {**WHO, "model": "pirate", "max_tokens": 40, "stream": True}

        async def stream() -> None:
            answer = await on.http.post("/v1/chat/completions", json=body)
            pieces.extend(frames(answer.text)[:-1])

        streaming = asyncio.ensure_future(stream())
        while not on.state.active:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        statuses.append((await on.unload()).status_code)
        statuses.append((await on.ask("pirate")).status_code)
        await streaming
        told = "".join(one["choices"][0]["delta"].get("content") or "" for one in pieces)
        assert told == whole
        assert statuses == [200, 404]
        assert await on.names() == ["quire-tiny"]

    serve(test)


def test_wrong_files_are_refused_alone(serve: Run, other: str, tmp_path: Path) -> None:
    async def refused(on: Server, path: str) -> str:
        answer = await on.load(path, "wrong")
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "InvalidUserInput"), error
        return str(error["message"])

    async def test(on: Server) -> None:
        await on.load()
        pirate = await on.text("pirate")
        config = json.loads((Path(other) / "adapter_config.json").read_text())
        file = Path(other) / "adapter_model.safetensors"
        for change, says in ({"r": 64}, "64"), ({"peft_type": "IA3"}, "IA3"), ({"bias": "x"}, "bias"):  # fmt: skip
            (Path(other) / "adapter_config.json").write_text(json.dumps({**config, **change}))
            assert says in await refused(on, other)
        (Path(other) / "adapter_config.json").write_text(json.dumps(config))
        file.write_bytes(file.read_bytes()[:5000])
        assert "longer than the file" in await refused(on, other)
        file.unlink()
        for path in (other, str(tmp_path / "none")):
            answer = await on.load(path, "wrong")
            found = (answer.status_code, answer.json()["error"]["type"])
            assert found == (404, "LoRAAdapterNotFoundError")
        assert await on.names() == ["quire-tiny", "pirate"]
        assert await on.text("pirate") == pirate
        await on.unload()

    serve(test)


def test_fifty_loads_and_unloads_under_traffic_tell_the_truth(serve: Run, other: str) -> None:
    async def test(on: Server) -> None:
        base = await on.text()
        await on.load()
        pirate, draw = await on.text("pirate"), random.Random(7)
        await on.unload()
        true = {"pirate": {pirate}, "same": {base}, "either": {pirate, base}, "quire-tiny": {base}}
        paths = {"pirate": [PIRATE], "same": [other], "either": [PIRATE, other]}

        async def change() -> None:
            name = draw.choice(list(paths))
            await asyncio.sleep(draw.random() / 5)
            if draw.random() < 0.4:
                assert (await on.unload(name)).status_code in (200, 404)
            else:
                inplace = draw.random() < 0.5
                answer = await on.load(draw.choice(paths[name]), name, load_inplace=inplace)
                assert answer.status_code == 200 or (answer.status_code == 400 and not inplace)

        async def use() -> None:
            name = draw.choice(list(true))
            await asyncio.sleep(draw.random() / 5)
            answer = await on.ask(name)
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["message"]["content"] in true[name]
            else:
                assert answer.status_code == 404
                assert name != "quire-tiny"

        await asyncio.gather(*(change() for _ in range(50)), *(use() for _ in range(30)))
        for name in (await on.names())[1:]:
            assert (await on.text(name)) in true[name]
            assert (await on.unload(name)).status_code == 200
        assert await on.names() == ["quire-tiny"]

    serve(test)
