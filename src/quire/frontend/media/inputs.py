"""Pictures of requests, from what a request gives to what the engine takes.

    given     GivenPicture   a URL, bytes, or an object of Pillow or numpy
    fetched   bytes          `fetch.py`, in the event loop
    read      ReadPicture    decoded and processed in another process, or found in the cache
    placed    Picture        its tokens are in the prompt

Knows these steps and their limits. Does not know HTTP routes, or the engine.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np

from quire.config.engine import Resolved
from quire.errors import QueueFull, Unsupported
from quire.frontend.media.content_parts import GivenPicture
from quire.frontend.media.errors import refused
from quire.frontend.media.fetch import Fetcher, File
from quire.frontend.media.picture_messages import Processed
from quire.frontend.media.picture_processes import PictureProcesses
from quire.frontend.media.placeholders import Placeholder, Placeholders, WrittenText, runs_of
from quire.frontend.media.processed_cache import ProcessedCache, ReadPicture
from quire.frontend.prompts import Prompt
from quire.frontend.tokenizer import Tokenizer
from quire.models.vision import VisionModel, most_rows
from quire.protocol.media import IMAGE

GIB = 1 << 30
MOST_WAITING = 256  # pictures of all requests that wait for a process


class PictureInputs:
    """One for each frontend. `load` is for its event loop; all else may be called from any thread.

    Raises:
        Unsupported: the tokenizer does not have the model's token of a picture.
    """

    def __init__(self, model: VisionModel, resolved: Resolved, tokenizer: Tokenizer):
        media = resolved.config.media
        self.model, self.tokenizer, self.limit = model, tokenizer, media.max_pictures
        self.most_rows = most_rows(resolved, model)
        image = self._placeholder(tokenizer)
        self.placeholders = Placeholders([image], tokenizer)
        self.placeholder = model.placeholder or image.token
        """What stands for a picture in a text."""
        self.fetcher = Fetcher(media)
        self.processes = PictureProcesses(resolved.path)
        fronts = max(1, resolved.config.server.api_server_count or 1)
        self.cache = ProcessedCache(int(media.mm_processor_cache_gb * GIB) // fronts)
        self._threads = ThreadPoolExecutor(self.processes.count, "pictures")
        self._waiting = 0

    def _placeholder(self, tokenizer: Tokenizer) -> Placeholder:
        """Raises Unsupported: as the class."""
        row_id = self.model.image_token_id
        row = tokenizer.token(row_id)
        if row is None:
            raise Unsupported(f"pictures with a tokenizer that has no token {row_id}", "send text")
        token = self.model.token or row
        ids = tokenizer.encode(token, False)
        if len(ids) != 1:
            raise Unsupported(f"pictures with a tokenizer that has no token {token!r}", "send text")
        return Placeholder(IMAGE, token, ids[0], row, row_id)

    def prepare(self) -> None:
        """Start a process before the first picture comes; does not wait for it."""
        self._threads.submit(self.processes.prepare)

    # -- reading ----------------------------------------------------------------------------------
    async def load(self, given: Sequence[GivenPicture], scope: str = "") -> list[ReadPicture]:
        """Fetch and process the pictures of a request. `scope`: see `ProcessedCache.get`.

        Raises:
            ValidationError, NotFetched: a picture cannot be used; the error names its place.
            QueueFull: too many pictures wait.
        """
        self._check_number(given)
        known = {one: self._named(one, scope) for one in given if one.source is None}
        given, all_given = [one for one in given if one.source is not None], given
        files = await self.fetcher.fetch([self._as_file(one) for one in given])
        if self._waiting + len(files) > MOST_WAITING:
            raise QueueFull(f"{self._waiting} pictures wait to be decoded; try again later")
        loop = asyncio.get_running_loop()
        self._waiting += len(files)
        try:
            work = [
                loop.run_in_executor(self._threads, self.read, data, one.where, scope, one.uuid)
                for data, one in zip(files, given, strict=True)
            ]
            known |= zip(given, await asyncio.gather(*work), strict=True)
        finally:
            self._waiting -= len(files)
        return [known[one] for one in all_given]

    def load_now(self, given: Sequence[GivenPicture]) -> list[ReadPicture]:
        """As `load`, for a program without an event loop of its own in this thread. Blocks."""
        self._check_number(given)
        for one in given:
            if one.source is None:
                raise refused(
                    one.where, "a picture without data is only for servers: pass the picture"
                )
        fetch = self.fetcher.fetch([self._as_file(one) for one in given])
        with ThreadPoolExecutor(1) as thread:  # this thread may have a loop that runs
            files = thread.submit(asyncio.run, fetch).result()
        return [self.read(data, one.where) for data, one in zip(files, given, strict=True)]

    def read(self, data: File, where: str, scope: str = "", uuid: str = "") -> ReadPicture:
        """Decode and process a file, unless the cache has it, and remember its name. Blocks.

        Raises:
            ValidationError: it cannot be used.
        """
        digest = blake2b(data, digest_size=20, person=b"quire image").hexdigest()
        if (picture := self.cache.get(scope, digest)) is None:
            picture = self._picture(digest, self.processes.process(data, where), where)
            self.cache.put(scope, picture)
        if uuid:
            self.cache.name(scope, uuid, digest)
        return picture

    def _named(self, given: GivenPicture, scope: str) -> ReadPicture:
        """Raises ValidationError: no picture of this name is in the cache."""
        if (picture := self.cache.named(scope, given.uuid)) is None:
            raise refused(
                given.where, "the server has no picture of this `uuid` (any more): send it again"
            )
        return picture

    def _check_number(self, given: Sequence[GivenPicture]) -> None:
        if len(given) > self.limit:
            raise refused(
                given[self.limit].where,
                f"the request has {len(given)} pictures; the limit is {self.limit} (--limit-mm-per-prompt)",
            )

    def _as_file(self, given: GivenPicture) -> GivenPicture:
        if isinstance(given.source, str | bytes):
            return given
        return GivenPicture(given.where, as_file(given.source, given.where), given.uuid)

    def _picture(self, digest: str, made: Processed, where: str) -> ReadPicture:
        ids = self.tokenizer.encode(made.replacement, False)
        runs = runs_of(ids, self.model.image_token_id)
        rows = sum(length for _, length in runs)
        if rows > self.most_rows:
            raise refused(
                where,
                f"the picture takes {rows} tokens; the limit is {self.most_rows} (--max-num-batched-tokens): send a smaller one",
            )
        grids = [self._grid(made)] if self.model.has_grid else []
        if not rows or (grids and [prod(grid) for grid in grids] != [n for _, n in runs]):
            raise refused(
                where, "the model's processor gives no tokens for this picture: send another size"
            )
        row = re.escape(self.placeholders.kinds[0].row)
        text = re.sub(f"(?:{row})+", lambda found: self.placeholders.kinds[0].row, made.replacement)
        return ReadPicture(IMAGE, digest, text, ids, runs, grids, made.tensors)

    def _grid(self, made: Processed) -> tuple[int, int, int]:
        t, h, w = np.frombuffer(made.tensors["image_grid_thw"].data, np.int64).tolist()
        return t, h // self.model.merge, w // self.model.merge

    # -- placing ----------------------------------------------------------------------------------
    def tokenized(
        self,
        prompt: Prompt,
        pictures: Sequence[ReadPicture],
        tokenize: Callable[[Prompt], Prompt],
        mark: str = "",
    ) -> Prompt:
        """The prompt, of text or tokens, with the pictures' own tokens. `mark`: of tokens that users spelled.

        Raises:
            ValidationError: as `placed`; and what `tokenize` raises.
        """
        if prompt.tokens or prompt.text is None:
            tokens = Prompt(prompt.text, prompt.tokens, prompt.salt)
            return self.placed(tokenize(tokens), pictures)
        written = self.placeholders.written(prompt.text, pictures, mark)
        found = tokenize(Prompt(written.text, salt=prompt.salt))
        found.text = self.placeholders.unmarked(prompt.text, mark) if mark else prompt.text
        return self.placed(found, pictures, written)

    def placed(
        self, prompt: Prompt, pictures: Sequence[ReadPicture], written: WrittenText | None = None
    ) -> Prompt:
        """The prompt with the pictures' own tokens. `written`: the text of its tokens; None: they have one placeholder for each picture.

        Raises:
            ValidationError: it has another number of placeholders.
        """
        if written is None:
            tokens, media = self.placeholders.expanded_ids(prompt.tokens, pictures)
        else:
            tokens, media = self.placeholders.expanded(prompt.tokens, written.named, pictures)
        return Prompt(prompt.text, tokens, prompt.salt, media=media)


def as_file(source: Any, where: str) -> bytes:
    """An object of Pillow, or an array [H, W, 3] of uint8, as a PNG file, which keeps every pixel.

    Raises:
        ValidationError: another object.
    """
    from PIL import Image

    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
            raise refused(where, "an array must be [height, width, 3] of uint8")
        source = Image.fromarray(source)
    if not isinstance(source, Image.Image):
        raise refused(where, f"must be an image of Pillow or an array, not {type(source).__name__}")
    if source.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        source = source.convert("RGB")
    file = io.BytesIO()
    source.save(file, "PNG", compress_level=1)
    return file.getvalue()
