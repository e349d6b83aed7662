"""Fetches the bytes of pictures, videos and sound: data: URLs, http and https, and files below one directory.

One deadline for all items of a request, and one bound on their bytes. Every hop of a redirect passes the same checks as
the first URL. Knows URLs and bytes. Does not know what they are.
"""

from __future__ import annotations

import asyncio
import binascii
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urljoin, urlsplit

import pybase64

from quire import env
from quire.config.media import MediaConfig
from quire.frontend.media.addresses import check_domain, read_url, resolve
from quire.frontend.media.content_parts import GivenMedia
from quire.frontend.media.errors import not_fetched, refused
from quire.frontend.media.http_get import BadAnswer, get
from quire.protocol.media import AUDIO, VIDEO

MIB = 1 << 20
MOST_DATA_HEAD = 256  # characters of a data: URL before the base64
SHORT = 1 << 22  # characters of a data: URL that the event loop decodes itself, in less than 1 ms
MOST_REDIRECTS = 3
TIMEOUTS = {VIDEO: "VIDEO_FETCH_TIMEOUT", AUDIO: "AUDIO_FETCH_TIMEOUT"}
"""By kind of the slowest item: its deadline."""
REDIRECTS = (301, 302, 303, 307, 308)


File = bytes | bytearray


@dataclass(slots=True)
class Room:
    """Bytes that the items of one request may still have."""

    left: int

    def take(self, count: int, where: str) -> None:
        """Raises ValidationError: they are too many."""
        self.left -= count
        if self.left < 0:
            most = int(env.get("MAX_MEDIA_DOWNLOAD_SIZE_MB"))
            raise refused(where, f"the pictures, videos and sounds of a request may have {most} MiB (QUIRE_MAX_MEDIA_DOWNLOAD_SIZE_MB)")  # fmt: skip


class Fetcher:
    """One for a server, or for a program."""

    def __init__(self, config: MediaConfig):
        self.config = config
        self._slots: asyncio.Semaphore | None = None

    async def fetch(self, given: Sequence[GivenMedia]) -> list[File]:
        """The bytes of all items of a request, in order.

        Raises:
            ValidationError: a URL that this server does not fetch, or too many bytes. NotFetched: it could not be fetched
                in time.
        """
        if self._slots is None:
            self._slots = asyncio.Semaphore(int(env.get("MEDIA_LOADING_THREAD_COUNT")))
        room = Room(int(env.get("MAX_MEDIA_DOWNLOAD_SIZE_MB")) * MIB)
        kinds = {one.kind for one in given}
        name = next((name for kind, name in TIMEOUTS.items() if kind in kinds), "IMAGE_FETCH_TIMEOUT")  # fmt: skip
        seconds = float(env.get(name))
        tasks = [asyncio.create_task(self._one(one, room, self._slots)) for one in given]
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.gather(*tasks)
        except TimeoutError:
            late = next(one for one, task in zip(given, tasks, strict=True) if not _is_there(task))
            raise not_fetched(
                late.where, f"not fetched within {seconds:g} s (QUIRE_{name})"
            ) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, given: GivenMedia, room: Room, slots: asyncio.Semaphore) -> File:
        url, where = given.source, given.where
        if isinstance(url, bytes):
            room.take(len(url), where)
            return url
        if url.startswith("data:"):
            if len(url) <= SHORT:
                return decode_data_url(url, where, room)
            return await asyncio.to_thread(decode_data_url, url, where, room)
        if url.startswith("file:"):
            async with slots:
                return await asyncio.to_thread(self._file, url, where, room)
        async with slots:
            return await self._web(url, where, room)

    async def _web(self, url: str, where: str, room: Room) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            address = read_url(url, where)
            check_domain(address, self.config.allowed_media_domains, where)
            family, ip = await resolve(address, bool(self.config.allowed_media_domains), where)
            try:
                answer = await get(address, family, ip, lambda n: room.take(n, where))
            except BadAnswer as why:
                raise not_fetched(where, str(why)) from None
            except (OSError, asyncio.IncompleteReadError):
                raise not_fetched(where, "the connection to the host failed") from None
            if answer.status not in REDIRECTS:
                if answer.status != 200:
                    raise not_fetched(where, f"the host answers with status {answer.status}")
                return answer.body
            if not env.get("MEDIA_URL_ALLOW_REDIRECTS"):
                raise refused(where, "the URL redirects, which this server does not follow (VLLM_MEDIA_URL_ALLOW_REDIRECTS)")  # fmt: skip
            url = urljoin(address.url, answer.location)
            if address.scheme == "https" and urlsplit(url).scheme != "https":
                raise refused(where, "the URL redirects from https to another scheme")
        raise refused(where, f"the URL redirects more than {MOST_REDIRECTS} times")

    def _file(self, url: str, where: str, room: Room) -> bytes:
        """The file, opened directory by directory below the allowed one, so that no link leads elsewhere."""
        root = self.config.allowed_local_media_path
        if not root:
            raise refused(
                where, "this server reads no files (--allowed-local-media-path): send a data: URL"
            )
        no = refused(where, "there is no such file below --allowed-local-media-path")
        parts = urlsplit(url)
        path = PurePosixPath(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or ".." in path.parts or "\0" in str(path):
            raise no
        base = os.path.realpath(root)
        names = next((path.relative_to(one).parts for one in (base, root) if path.is_relative_to(one)), ())  # fmt: skip
        folder = -1
        try:
            folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
            for name in names[:-1]:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(names[-1], flags, dir_fd=folder), "rb") as file:
                facts = os.fstat(file.fileno())
                if not stat.S_ISREG(facts.st_mode):
                    raise no
                room.take(facts.st_size, where)
                return file.read(facts.st_size)
        except (OSError, IndexError):
            raise no from None
        finally:
            if folder >= 0:
                os.close(folder)


def _is_there(task: asyncio.Task[File]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def decode_data_url(url: str, where: str, room: Room) -> File:
    """The file in a data: URL.

    Raises:
        ValidationError: it is no data: URL with base64, or has too many bytes.
    """
    comma = url.find(",", 0, MOST_DATA_HEAD)
    if comma < 0 or not url[:comma].endswith(";base64"):
        raise refused(
            where, "a data: URL must be data:image/png;base64,... with the file in base64"
        )
    size = (len(url) - comma - 1) // 4 * 3 - (url.endswith("=") + url.endswith("=="))
    room.take(max(size, 0), where)
    with suppress(binascii.Error, ValueError):
        return pybase64.b64decode(memoryview(url.encode("ascii"))[comma + 1 :], validate=True)
    raise refused(where, "this is not valid base64")
