"""Ways to talk to an application without a socket: httpx for whole answers, raw ASGI where time matters."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from scripted import ScriptedEngine, make_state

from quire.server.app import build_app
from quire.server.state import ServerState

DIRECT: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "query_string": b"",
    "root_path": "",
    "client": ("127.0.0.1", 1),
    "server": ("server", 80),
    "state": {},
}
"""What the scope of a request has besides its path and headers."""


def browser(state: ServerState, **options: Any) -> httpx.AsyncClient:
    """An httpx client of the state's application."""
    app = build_app(state)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://server", **options
    )


def ask(
    engine: ScriptedEngine | None, method: str, path: str, body: Any = None,
    headers: dict[str, str] | None = None, state: ServerState | None = None, **config: Any,
) -> httpx.Response:  # fmt: skip
    """One request, one answer."""

    async def go() -> httpx.Response:
        async with browser(state or make_state(engine, **config)) as client:
            if body is None:
                return await client.request(method, path, headers=headers)
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(go())


def frames(text: str) -> list[Any]:
    """The events of a stream; [DONE] and comments as they are."""
    found: list[Any] = []
    for event in text.split("\n\n"):
        if not event:
            continue
        data = event.removeprefix("data: ")
        found.append(json.loads(data) if data.startswith("{") else data)
    return found


class Call:
    """One ASGI request whose answer is read as it comes, and that can be hung up."""

    def __init__(
        self,
        state: ServerState,
        path: str,
        body: Any,
        headers: dict[str, str],
        method: str = "POST",
    ):
        raw = {"content-type": "application/json", **headers}
        self.scope = {
            **DIRECT,
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in raw.items()],
        }
        self.events: list[str] = []
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self.task = asyncio.ensure_future(
            build_app(state)(self.scope, self.incoming.get, self.outgoing.put)
        )

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.outgoing.get(), 60)

    async def frame(self) -> str:
        """The next event of the body; several may come in one piece."""
        while not self.events:
            message = await self.next()
            if message["type"] == "http.response.body":
                self.events += re.findall(r".*?\n\n", message["body"].decode(), re.DOTALL)
        return self.events.pop(0)

    def hang_up(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 60)


@asynccontextmanager
async def calling(
    state: ServerState,
    path: str,
    body: Any,
    headers: dict[str, str] | None = None,
    method: str = "POST",
) -> AsyncIterator[Call]:
    call = Call(state, path, body, headers or {}, method)
    try:
        yield call
    finally:
        call.hang_up()
        await call.ended()
