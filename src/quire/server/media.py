"""Pictures, videos and sound of requests: read in the server's event loop before the conversation is rendered.

Knows the messages of bodies, and the frontend's reader of media. Does not know how they are fetched or decoded.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Receive

from quire.api.async_engine import AsyncEngine
from quire.config.media import MediaConfig, media_reading
from quire.frontend.media.content_parts import MediaPart, find_parts
from quire.frontend.media.program_items import options_text
from quire.frontend.media.prompt_reader import need_media
from quire.server.errors import invalid
from quire.server.sse import until_disconnect

MOST_ENTRIES = 10_000
"""The server looks for media in lists of at most this many entries; the routes refuse longer lists of messages, texts and conversations."""


async def read_media(
    messages: Any, name: str, engine: AsyncEngine, scope: str, receive: Receive, options: str = ""
) -> None:
    """Replace the pictures, videos and sounds in messages, or in a message, or in lists of messages, by parts that carry them.

    `name`: of the field. `scope`: whose processed items and names count. `receive`: of the request: reading ends when the client is gone.
    `options`: of the processing of all of them.

    Raises:
        ValidationError: an item that cannot be used; the error names its place. NotFetched: it could not be fetched.
        QueueFull: too many items wait. ClientDisconnect: the client is gone.
    """
    many = messages if isinstance(messages, list) else [messages]
    if len(many) > MOST_ENTRIES:
        return  # tokens, or refused by the route
    if many and isinstance(many[0], list):
        for index, one in enumerate(many):
            if _is_conversation(one):
                await read_media(one, f"{name}[{index}]", engine, scope, receive, options)
        return
    if not any(isinstance(one, dict) for one in many):
        return  # texts and tokens of other routes
    places = find_parts(messages, name, options=options)
    if not places:
        return
    reader = need_media(engine.front, places[0].given.where, places[0].given.kind)
    loading = reader.load([place.given for place in places], scope)
    items = await until_disconnect(receive, loading)
    for place, item in zip(places, items, strict=True):
        place.parts[place.index] = MediaPart(item)


def _is_conversation(value: Any) -> bool:
    """Whether an entry of a list is a list of messages, and not of tokens."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def options_of(body: Any, config: MediaConfig) -> str:
    """Options of the pictures of a request, as JSON; empty: none.

    Raises:
        ApiError: this server takes none from requests. ValidationError: a key or value that is not taken.
    """
    given = getattr(body, "mm_processor_kwargs", None) or {}
    reading = getattr(body, "media_io_kwargs", None) or {}
    name = "mm_processor_kwargs" if given else "media_io_kwargs"
    if not (given or reading):
        return ""
    if not config.trust_request_mm_kwargs:
        raise invalid(
            f"`{name}`: this server takes none from requests (--trust-request-mm-kwargs); leave it out",
            name,
        )
    try:
        frames = media_reading(reading).get("video", {})
    except ValueError as why:
        raise invalid(f"`media_io_kwargs` {why}", "media_io_kwargs") from None
    return options_text({**frames, **given})
