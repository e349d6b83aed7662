"""Pictures of requests: read in the server's event loop before the conversation is rendered.

Knows the messages of bodies, and the frontend's reader of pictures. Does not know how pictures are fetched or decoded.
"""

from __future__ import annotations

from typing import Any

from quire.api.async_engine import AsyncEngine
from quire.frontend.media.content_parts import PicturePart, find_parts


async def read_pictures(messages: Any, name: str, engine: AsyncEngine, scope: str) -> None:
    """Replace the pictures in messages, or in lists of messages, by parts of type image that carry them.

    `name`: of the field. `scope`: whose processed pictures and names count.

    Raises:
        ValidationError: a picture that cannot be used; the error names its place. NotFetched: it could not be fetched.
        QueueFull: too many pictures wait.
    """
    if isinstance(messages, list) and messages and isinstance(messages[0], list):
        for index, conversation in enumerate(messages):
            await read_pictures(conversation, f"{name}[{index}]", engine, scope)
        return
    places = find_parts(messages, name)
    if not places:
        return
    reader = engine.front.need_pictures(places[0].given.where)
    pictures = await reader.load([place.given for place in places], scope)
    for place, picture in zip(places, pictures, strict=True):
        place.parts[place.index] = PicturePart(picture)
