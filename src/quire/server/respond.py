"""The last step of every streaming endpoint.

Knows a request, its generation and its encoder. Does not know the content of events.
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
    """A stream whose first frame is ready, or takes long.

    Raises:
        Exception: an error before the first frame; the client gets its status.
    """
    state: ServerState = request.app.state.quire
    keep_alive = state.config.server.sse_keep_alive_interval
    stream = EventStream(generation, teller, request.receive, keep_alive, failed)
    await stream.prepare()
    return stream
