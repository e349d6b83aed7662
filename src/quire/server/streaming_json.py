"""Large answers: JSON in parts; a thread encodes each part when the client has taken the one before.

Knows JSON, threads and ASGI. Does not know an answer's content.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.request_body import json_response
from quire.server.sse import DisconnectGuard

LARGE_ENTRIES = 1 << 12
"""Tokens and log-probabilities from which on an answer is encoded in parts: fewer block the event loop for about 10 ms."""
PART_BYTES = 64 << 10
ROWS = 32  # items of a list that are encoded together

_MARK = secrets.token_hex(16)  # random: occurs in no answer by chance
_ENCODED_MARK = f'"{_MARK}"'.encode()


class LongList:
    """A list in an answer whose items are made while they are encoded."""

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self.make = make

    def encoded(self) -> Iterator[bytes]:
        items, before = iter(self.make()), b"["
        while rows := list(islice(items, ROWS)):
            try:
                yield before + msgspec.json.encode(rows)[1:-1]
            except TypeError:  # the rows contain LongLists
                for row in rows:
                    yield before
                    yield from encoded_parts(row)
                    before = b","
            before = b","
        yield b"[]" if before == b"[" else b"]"


def listed(items: Callable[[], Iterable[Any]], large: bool) -> Any:
    """A list; in a large answer, one that is encoded while it is sent."""
    return LongList(items) if large else list(items())


def encoded_parts(body: Any) -> Iterator[bytes]:
    """The JSON of `body`, which may contain LongLists anywhere."""
    lists: list[LongList] = []

    def later(value: Any) -> str:
        if not isinstance(value, LongList):
            raise NotImplementedError(f"{type(value).__name__} cannot be encoded as JSON")
        lists.append(value)
        return _MARK

    first, *rest = msgspec.json.Encoder(enc_hook=later).encode(body).split(_ENCODED_MARK)
    yield first
    for long, after in zip(lists, rest, strict=True):
        yield from long.encoded()
        yield after


class PartsAnswer(Response):
    """An answer in parts, each made just before it is sent."""

    def __init__(
        self, parts: Iterator[bytes], pool: Executor, media_type: str, headers: dict[str, str] | None = None
    ):  # fmt: skip
        super().__init__(b"", media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self.parts, self.pool = parts, pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hang_up, loop = DisconnectGuard(receive), asyncio.get_running_loop()
        try:
            with hang_up:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})  # fmt: skip
                while part := await loop.run_in_executor(self.pool, self._part):
                    for index in range(0, len(part), 2 * PART_BYTES):
                        piece = part[index : index + 2 * PART_BYTES]
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientDisconnect, OSError):
            pass
        finally:
            hang_up.close()

    def _part(self) -> bytes:
        part = bytearray()
        for piece in self.parts:
            part += piece
            if len(part) >= PART_BYTES:
                break
        return bytes(part)


class LargeAnswer(PartsAnswer):
    """JSON in parts."""

    def __init__(self, body: Any, pool: Executor, headers: dict[str, str] | None = None):
        super().__init__(encoded_parts(body), pool, "application/json", headers)


def json_answer(
    body: Any, large: bool, pool: Executor, headers: dict[str, str] | None = None
) -> Response:
    return LargeAnswer(body, pool, headers) if large else json_response(body, headers=headers)
