"""POST /start_profile and /stop_profile: record steps of the workers. Only with --profiler-config.

Knows the requests, and two functions of the workers. Does not know what these do.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.config.profiler import check_recording
from quire.server.errors import ApiError
from quire.server.request_body import json_response, read
from quire.server.schemas import StartProfileRequest
from quire.server.state import state_of


async def start_profile(request: Request) -> Response:
    """Record the next steps of the workers."""
    state = state_of(request)
    engine = state.serving()
    chunked = "transfer-encoding" in request.headers
    empty = request.headers.get("content-length", "0") == "0" and not chunked
    body = StartProfileRequest() if empty else await read(state, request, StartProfileRequest)
    values = body.profile_prefix, body.delay_iterations, body.max_iterations
    check_recording(*values)
    started = await engine.call("collective_rpc", "start_profile", list(values), {})
    if not all(started):
        raise ApiError(409, "the profiler records already; call /stop_profile first", kind="Conflict")  # fmt: skip
    return json_response({"status": "started"})


async def stop_profile(request: Request) -> Response:
    """Stop the profiler. Each worker writes one trace file."""
    written = await state_of(request).serving().call("collective_rpc", "stop_profile", [], {})
    return json_response({"status": "stopped", "files": [name for name in written if name]})
