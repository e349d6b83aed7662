"""Pictures of requests: read in the server's event loop before the conversation is rendered.

Knows the messages of bodies, and the frontend's reader of pictures. Does not know how pictures are fetched or decoded.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Receive

from quire.api.async_engine import AsyncEngine
from quire.frontend.media.content_parts import MediaPart, find_parts
from quire.server.sse import until_disconnect


async def read_media(
    messages: Any, name: str, engine: AsyncEngine, scope: str, receive: Receive
) -> None:
    """Replace the pictures in messages, or in lists of messages, by parts of type image that carry them.

    `name`: of the field. `scope`: whose processed pictures and names count. `receive`: of the request: reading ends when the client is gone.

    Raises:
        ValidationError: a picture that cannot be used; the error names its place. NotFetched: it could not be fetched.
        QueueFull: too many pictures wait. ClientDisconnect: the client is gone.
    """
    if isinstance(messages, list) and messages and isinstance(messages[0], list):
        for index, conversation in enumerate(messages):
            await read_media(conversation, f"{name}[{index}]", engine, scope, receive)
        return
    places = find_parts(messages, name)
    if not places:
        return
    reader = engine.front.need_media(places[0].given.where)
    loading = reader.load([place.given for place in places], scope)
    pictures = await until_disconnect(receive, loading)
    for place, picture in zip(places, pictures, strict=True):
        place.parts[place.index] = MediaPart(picture)
