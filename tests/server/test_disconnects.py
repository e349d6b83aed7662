"""A client disconnects in the same turn of the event loop in which its answer is ready."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from quire.server.sse import until_disconnect


@pytest.mark.parametrize("turns", range(5))
def test_a_late_disconnect_does_not_cancel_what_comes_after(turns: int):
    """The work is done `turns` turns of the event loop after the disconnect: it has a result, or ends with ClientDisconnect."""

    async def go() -> str:
        gone: asyncio.Future[Any] = asyncio.Future()
        done: asyncio.Future[str] = asyncio.Future()

        async def receive() -> Any:
            return await gone

        async def work() -> str:
            return await done

        async def request() -> str:
            try:
                found = await until_disconnect(receive, work())
            except ClientDisconnect:
                return "gone"
            await asyncio.sleep(0.01)
            return found

        task = asyncio.create_task(request())
        await asyncio.sleep(0.01)
        gone.set_result({"type": "http.disconnect"})
        for _ in range(turns):
            await asyncio.sleep(0)
        if not done.done():
            done.set_result("done")
        return await task

    assert asyncio.run(go()) in ("done", "gone")
