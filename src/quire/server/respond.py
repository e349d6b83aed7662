"""The last step of a streaming endpoint, the same for all.

Knows a request, where its news come from and who tells them. Does not know what is told.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from quire.server.generation import Generation, OutputDelta
from quire.server.sse import EventEncoder, EventStream, failed
from quire.server.state import ServerState


async def answer(
    request: Request,
    generation: Generation,
    teller: EventEncoder[OutputDelta],
    failed: Callable[[BaseException], bytes] = failed,
) -> EventStream:
    """A stream whose first frame is there, or is taking its time.

    Raises:
        Exception: whatever went wrong before the first frame: it is answered with its own status.
    """
    state: ServerState = request.app.state.quire
    keep_alive = state.config.server.sse_keep_alive_interval
    stream = EventStream(generation, teller, request.receive, keep_alive, failed)
    await stream.prepare()
    return stream
