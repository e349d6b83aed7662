"""A server of a tiny Whisper that answers with or without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.config.server import ServerConfig
from quire.frontend.media.wav import write_wav
from quire.frontend.startup import start_engine
from quire.observe.prometheus import ServerMetrics
from quire.server.app import build_app
from quire.server.process import sockets
from quire.server.state import ServerState

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    return write_wav(samples, rate)


class SoundServer:
    def __init__(self, path: str, **options: Any):
        fixed = {"dtype": "float32", "max_num_seqs": 6, "block_size": 16, "kv_cache_memory_bytes": 64 << 20}  # fmt: skip
        self.config = EngineConfig.from_keywords(model=path, served_model_name="toy", **{**fixed, **options})  # fmt: skip
        self.client, tokenizer = start_engine(self.config)
        self.state = ServerState(self.config, ServerMetrics("toy", process=False))
        self.engine = AsyncEngine(self.client, tokenizer=tokenizer)
        self.state.attach(self.engine)
        self.app = build_app(self.state)

    def run(self, work: Any) -> Any:
        """`await work(http)` with a client of this server."""

        async def go() -> Any:
            transport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]
            async with httpx.AsyncClient(
                transport=transport, base_url="http://server", timeout=60
            ) as http:
                return await work(http)

        return asyncio.run(go())

    def ask(
        self, sound: bytes | None, path: str = TRANSCRIPTIONS, name: str = "a.wav", **fields: Any
    ) -> httpx.Response:
        """The answer to a form with this file and these fields."""
        files = None if sound is None else {"file": (name, sound)}
        data = {key: value if isinstance(value, list) else str(value) for key, value in fields.items()}  # fmt: skip

        async def post(http: httpx.AsyncClient) -> httpx.Response:
            return await http.post(path, files=files or {"none": ("", b"")}, data=data)

        found: httpx.Response = self.run(post)
        return found

    def json(self, sound: bytes, path: str = TRANSCRIPTIONS, **fields: Any) -> dict[str, Any]:
        found = self.ask(sound, path, **fields)
        assert found.status_code == 200, found.text
        answer: dict[str, Any] = found.json()
        return answer

    def refused(self, sound: bytes | None, status: int = 400, **fields: Any) -> tuple[str, str]:
        """(message, parameter) of the error."""
        found = self.ask(sound, **fields)
        assert found.status_code == status, found.text
        error = found.json()["error"]
        return error["message"], error["param"]

    def events(self, sound: bytes, path: str = TRANSCRIPTIONS, **fields: Any) -> list[Any]:
        """The data of a stream's frames; the last one is [DONE]."""
        found = self.ask(sound, path, stream="true", **fields)
        assert found.status_code == 200, found.text
        lines = [line for line in found.text.split("\n") if line]
        assert all(line.startswith("data: ") for line in lines), found.text
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Its URL, while it listens on a socket."""
        config = ServerConfig(host="127.0.0.1", port=0)
        listener = sockets.bind(config)
        http = sockets.http_server(self.app, config)
        thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])))
        listener.listen()
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            http.should_exit = True
            thread.join(60)
            listener.close()

    def close(self) -> None:
        self.client.close()
