"""A server that sends scripted bytes and records its requests."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import Callable, Iterable
from typing import Any

Reply = Callable[[str, str, Any], Iterable[bytes | float]]
"""(method, path, body) -> pieces to send, and seconds to wait between them."""


def whole(body: Any, status: str = "200 OK") -> list[bytes | float]:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return [head.encode() + data]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class Wire:
    """`async with Wire(reply) as wire:` listens inside, at `wire.url`."""

    def __init__(self, reply: Reply, port: int = 0, tls: ssl.SSLContext | None = None):
        self.reply, self.port, self.tls = reply, port, tls
        self.asked: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = self.now = self.most = 0

    async def __aenter__(self) -> Wire:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        scheme = "https" if self.tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                raw = await reader.readexactly(int(fields["content-length"]))
                body = json.loads(raw) if raw else None
                self.asked.append((method, path, body))
                self.headers.append(fields)
                self.now += 1
                self.most = max(self.most, self.now)
                try:
                    if not await self._send(writer, self.reply(method, path, body)):
                        return
                finally:
                    self.now -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, parts: Iterable[bytes | float]) -> bool:
        for part in parts:
            if isinstance(part, float):
                await asyncio.sleep(part)
                continue
            if not part:
                return False  # hang up
            writer.write(part)
            await writer.drain()
        return True


def model(method: str, path: str, body: Any) -> Iterable[bytes | float]:
    """A small server: three tokens for each prompt, or fewer if so requested."""
    if path == "/health":
        return whole({})
    if path == "/v1/models":
        return whole({"object": "list", "data": [{"id": "m/toy"}]})
    if path == "/v1/completions":
        texts = ("one", " two", " three")[: body.get("max_tokens", 3)]
        pieces: list[bytes | float] = [STREAM]
        for text in texts:
            pieces += [0.005, chunk(event({"choices": [{"index": 0, "text": text}]}))]
        used = {"prompt_tokens": 7, "completion_tokens": len(texts)}
        return [*pieces, chunk(event({"choices": [], "usage": used})), END]
    return whole({"error": {"message": "no such path"}}, "404 Not Found")


async def main(port: int) -> None:
    async with Wire(model, port):
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
