"""A server on an engine with scripted tensors."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from vector_engine import EMBEDS, VectorClient, write_bert_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "server"))  # scripted, asgi

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.observe.prometheus import ServerMetrics
from quire.protocol.pooling_info import PoolingInfo
from quire.server.app import build_app
from quire.server.state import ServerState

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert")
    write_bert_tokenizer(made, TEMPLATE)
    return made


class PoolingServer:
    """A server that answers without a socket."""

    def __init__(
        self, folder: Path, info: PoolingInfo | None, max_model_len: int = 32, **config: Any
    ):
        self.client = VectorClient(folder, info, max_model_len, **config)
        found = EngineConfig.from_keywords(model=str(folder), served_model_name="toy", **config)
        self.state = ServerState(found, ServerMetrics("toy", process=False))
        self.state.attach(AsyncEngine(self.client))  # type: ignore[arg-type]
        self.app = build_app(self.state)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server")  # type: ignore[arg-type]

    def ask(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        async def go() -> httpx.Response:
            async with self.http() as http:
                return await http.post(path, json=body, headers=headers)

        return asyncio.run(go())

    def error(self, path: str, body: Any, status: int = 400) -> str:
        """The error's message and parameter."""
        found = self.ask(path, body)
        assert found.status_code == status, found.text
        return f"{found.json()['error']['message']} [{found.json()['error']['param']}]"


Serving = Callable[..., PoolingServer]


@pytest.fixture
def serving(bert_folder: Path) -> Iterator[Serving]:
    made: list[PoolingServer] = []

    def make(info: PoolingInfo | None = EMBEDS, **more: Any) -> PoolingServer:
        made.append(PoolingServer(bert_folder, info, **more))
        return made[-1]

    yield make
    for one in made:
        one.state.texts._executor.shutdown()
        one.client.close()
