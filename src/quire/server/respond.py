"""The last step of a streaming endpoint, the same for all.

Knows a request and its frames. Does not know what they say.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request

from quire.server.sse import EventStream, failed
from quire.server.state import ServerState


async def answer(
    request: Request,
    frames: AsyncGenerator[bytes, None],
    failed: Callable[[Exception], bytes] = failed,
) -> EventStream:
    """A stream whose first frame is there, or is taking its time.

    Raises:
        Exception: whatever went wrong before the first frame: it is answered with its own status.
    """
    state: ServerState = request.app.state.quire
    stream = EventStream(frames, state.config.server.sse_keep_alive_interval, failed)
    await stream.prepare(request.receive)
    return stream
