"""Calls the application within its own process, without a socket, for `quire run-batch`.

Knows ASGI. Does not know routes.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message


async def ask(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """POST a JSON body: (status, the answer's body)."""
    done = asyncio.Event()
    unread = [body]
    status, parts = 500, []

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop()}
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {},
    }
    try:
        await app(scope, receive, send)
    finally:
        done.set()
    return status, b"".join(parts)
