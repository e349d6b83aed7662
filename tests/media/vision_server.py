"""A server of a tiny vision model that answers without a socket, and web servers that have pictures."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.frontend.media.media_processes import MediaProcesses
from quire.frontend.media.prompt_reader import media_inputs
from quire.frontend.startup import start_engine
from quire.observe.prometheus import ServerMetrics
from quire.server.app import build_app
from quire.server.state import ServerState

DIRECT: dict[str, Any] = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
    "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1), "server": ("server", 80), "state": {},
}  # fmt: skip
"""What the scope of a request has besides its path and headers."""


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asking(*parts: Any, **more: Any) -> dict[str, Any]:
    """A chat request with these parts in its only message."""
    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": list(parts)}], **fields, **more}


class VisionServer:
    """`processes`: the processes that decode the server's pictures; None: the server starts them. `process`: the engine runs in another process."""

    def __init__(
        self, path: str, processes: MediaProcesses | None = None, *, process: bool = False, **options: Any
    ):  # fmt: skip
        fixed = {
            "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16,
        }  # fmt: skip
        self.config = EngineConfig.from_keywords(model=path, served_model_name="toy", **{**fixed, **options})  # fmt: skip
        self.client, tokenizer = start_engine(self.config, process=process)
        self.state = ServerState(self.config, ServerMetrics("toy", process=False))
        self.engine = AsyncEngine(self.client, tokenizer=tokenizer)
        if (reader := media_inputs(self.engine.front)) is not None and processes is not None:
            reader.processes = processes
        self.state.attach(self.engine)
        self.app = build_app(self.state)

    def ask(self, path: str, body: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]
            async with httpx.AsyncClient(
                transport=transport, base_url="http://server", timeout=60
            ) as http:
                return await http.post(path, json=body)

        return asyncio.run(go())

    def refused(self, *parts: Any, status: int = 400, **more: Any) -> tuple[str, str]:
        """(message, parameter) of the error that a chat with these parts gets."""
        found = self.ask("/v1/chat/completions", asking(*parts, **more))
        assert found.status_code == status, found.text
        error = found.json()["error"]
        return error["message"], error["param"]

    def close(self) -> None:
        self.client.close()


Respond = Callable[[bytes], bytes]


@contextmanager
def web_server(respond: Respond, seconds: float = 0.0) -> Iterator[tuple[int, list[bytes]]]:
    """(port, requests so far) of a server on loopback that sends what `respond` returns for the head of a request.

    `seconds`: it waits before each 1,000 bytes.
    """
    seen: list[bytes] = []
    ports: list[int] = []
    ready, loops, ends = threading.Event(), list[Any](), list[asyncio.Event]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head)
            answer = respond(head)
            for start in range(0, len(answer), 1000) if seconds else [0]:
                await asyncio.sleep(seconds)
                writer.write(answer[start : start + 1000] if seconds else answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        loops.append(asyncio.get_running_loop())
        ends.append(asyncio.Event())
        ready.set()
        await ends[0].wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield ports[0], seen
    finally:
        loops[0].call_soon_threadsafe(ends[0].set)
        thread.join(10)


def ok(body: bytes, *lines: str, length: bool = True) -> bytes:
    head = [*lines, *([f"Content-Length: {len(body)}"] if length else [])]
    return (
        "HTTP/1.1 200 OK\r\n" + "".join(f"{line}\r\n" for line in head) + "\r\n"
    ).encode() + body


def moved(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()
