"""GET, DELETE and cancel of stored responses.

Knows which key stored a response: another key gets 404. Does not know what a response contains.
"""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import ApiError, invalid
from quire.server.middleware import TENANT
from quire.server.request_body import json_response
from quire.server.response_store import EventsAsTheyAre, ResponseStore, StoredEvents, StoredResponse
from quire.server.sse import EventStream
from quire.server.state import ServerState, state_of

CANCEL_S = 5.0


def owner_of(request: Request) -> str:
    """The key's tenant; "" without keys."""
    tenant = request.scope.get(TENANT)
    return "" if tenant is None else str(tenant.id)


def why_not_stored(state: ServerState) -> str:
    if state.fronts > 1:
        return "responses are not stored with several HTTP processes (--api-server-count 1 has one)"
    return "responses are not stored here (--response-store-size)"


def _store(request: Request) -> ResponseStore:
    state = state_of(request)
    if state.responses is None:
        state.serving()  # it may still load
        name = str(request.path_params["name"])
        raise ApiError(404, f"there is no response `{name[:200]}`: {why_not_stored(state)}", param="response_id")  # fmt: skip
    return state.responses


def _record(request: Request) -> StoredResponse:
    return _store(request).get(owner_of(request), str(request.path_params["name"]))


async def stored_response(request: Request) -> Response | EventStream:
    """The object, or with `stream=true` the events after the one with sequence number `starting_after`.

    Raises:
        ApiError: 404; 400: a parameter is invalid, or the response has no events.
    """
    record, query = _record(request), request.query_params
    if query.get("stream", "false").lower() not in ("true", "1"):
        return Response(record.object(), media_type="application/json")
    if record.events is None:
        raise invalid("`stream`: only a response with `background` keeps its events", "stream")
    after = query.get("starting_after", "-1")
    if not re.fullmatch(r"-1|\d{1,15}", after, re.ASCII):
        raise invalid("`starting_after` must be the sequence number of an event", "starting_after")
    keep_alive = state_of(request).config.server.sse_keep_alive_interval
    events = StoredEvents(record, min(int(after), 1 << 40))
    stream = EventStream(events, EventsAsTheyAre(), request.receive, keep_alive)
    await stream.prepare()
    return stream


async def cancel(request: Request) -> Response:
    """End a background response. One that has ended stays as it is."""
    record = _record(request)
    if record.task is None:
        raise invalid("only a response with `background` can be cancelled", "response_id")
    if not record.ended:
        record.task.cancel()
        await _ended(record)
    return Response(record.object(), media_type="application/json")


async def delete(request: Request) -> Response:
    record = _store(request).delete(owner_of(request), str(request.path_params["name"]))
    if not record.ended:
        await _ended(record)
    return json_response({"id": record.id, "object": "response", "deleted": True})


async def _ended(record: StoredResponse) -> None:
    if record.task is not None:
        await asyncio.wait([record.task], timeout=CANCEL_S)
