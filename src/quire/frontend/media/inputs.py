"""Pictures of requests, from what a request gives to what the engine takes.

    given     GivenMedia   a URL, bytes, or an object of Pillow or numpy
    fetched   bytes          `fetch.py`, in the event loop
    read      ReadMedia    decoded and processed in another process, or found in the cache
    placed    Picture        its tokens are in the prompt

Knows these steps and their limits. Does not know HTTP routes, or the engine.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np

from quire.config.engine import Resolved
from quire.config.media import MOST
from quire.config.picture_options import merged
from quire.errors import QueueFull, Unsupported
from quire.frontend.media.content_parts import GivenMedia
from quire.frontend.media.errors import refused
from quire.frontend.media.fetch import Fetcher, File
from quire.frontend.media.given_rows import GivenRows
from quire.frontend.media.media_messages import Processed
from quire.frontend.media.media_processes import MediaProcesses
from quire.frontend.media.placeholders import Placeholder, Placeholders, WrittenText, runs_of
from quire.frontend.media.processed_cache import ProcessedCache, ReadMedia
from quire.frontend.media.row_inputs import RowInputs, blank_pixels
from quire.frontend.media.video_frames import DEFAULT_FPS, packed_frames
from quire.frontend.prompts import Prompt
from quire.frontend.tokenizer import Tokenizer
from quire.models.vision import VisionModel, most_rows
from quire.protocol.media import IMAGE, VIDEO

GIB = 1 << 30
MOST_WAITING = 256  # pictures of all requests that wait for a process


class MediaInputs:
    """One for each frontend. `load` is for its event loop; all else may be called from any thread.

    Raises:
        Unsupported: the tokenizer does not have the model's token of a picture.
    """

    def __init__(self, model: VisionModel, resolved: Resolved, tokenizer: Tokenizer):
        media = resolved.config.media
        self.model, self.tokenizer, self.num_frames = model, tokenizer, media.num_frames
        self.most_rows = most_rows(resolved, model)
        self.options = media.mm_processor_kwargs
        self.trusts_requests = media.trust_request_mm_kwargs
        self.rows = RowInputs(model, self.most_rows, media.enable_mm_embeds, self._blank)
        image = self._placeholder(tokenizer)
        kinds = [image, *self._of_videos(tokenizer)]
        self.placeholders = Placeholders(kinds, tokenizer)
        self.takes_videos = len(kinds) > 1
        texts = {IMAGE: model.placeholder, VIDEO: model.video_placeholder}
        self.texts = {one.kind: texts[one.kind] or one.token for one in kinds}
        """What stands for an item in a text, by kind."""
        self.limits = {
            IMAGE: media.max_pictures,
            VIDEO: media.limit_mm_per_prompt.get("video", MOST),
        }
        self.fetcher = Fetcher(media)
        self.processes = MediaProcesses(resolved.path, options=self.options)
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

    def _of_videos(self, tokenizer: Tokenizer) -> list[Placeholder]:
        """Empty: the model takes none."""
        id = self.model.video_token_id
        token = None if id is None else tokenizer.token(id)
        return [] if id is None or token is None else [Placeholder(VIDEO, token, id, token, id)]

    def prepare(self) -> None:
        """Start a process before the first picture comes; does not wait for it."""
        self._threads.submit(self.processes.prepare)

    # -- reading ----------------------------------------------------------------------------------
    async def load(self, given: Sequence[GivenMedia], scope: str = "") -> list[ReadMedia]:
        """Fetch and process the pictures of a request. `scope`: see `ProcessedCache.get`.

        Raises:
            ValidationError, NotFetched: a picture cannot be used; the error names its place.
            QueueFull: too many pictures wait.
        """
        self._check_number(given)
        named = [self._named(one, scope) if one.source is None else None for one in given]
        files = iter(await self.fetcher.fetch(self._files_of(given)))
        count = sum(found is None for found in named)
        if self._waiting + count > MOST_WAITING:
            raise QueueFull(f"{self._waiting} pictures wait to be decoded; try again later")
        loop = asyncio.get_running_loop()
        self._waiting += count
        try:
            work = [
                loop.run_in_executor(
                    self._threads, self._read, one, files_of_one(one, files), scope
                )
                for one, found in zip(given, named, strict=True)
                if found is None
            ]
            read = iter(await asyncio.gather(*work))
        finally:
            self._waiting -= count
        return [next(read) if found is None else found for found in named]

    def load_now(self, given: Sequence[GivenMedia], scope: str = "") -> list[ReadMedia]:
        """As `load`, for a program without an event loop of its own in this thread. Blocks."""
        self._check_number(given)
        fetch = self.fetcher.fetch(self._files_of(given))
        with ThreadPoolExecutor(1) as thread:  # this thread may have a loop that runs
            files = iter(thread.submit(asyncio.run, fetch).result())
        return [
            self._named(one, scope)
            if one.source is None
            else self._read(one, files_of_one(one, files), scope)
            for one in given
        ]

    def _read(self, given: GivenMedia, file: File | None, scope: str) -> ReadMedia:
        """As `read`, or the rows that a request gives."""
        if file is not None:
            return self.read(file, given, scope)
        picture = self.rows.read(given, given.source)
        if given.uuid:
            self._keep(picture, given, scope)
        return picture

    def read(self, data: File, given: GivenMedia, scope: str = "") -> ReadMedia:
        """Decode and process a file, unless the cache has it, and remember its name. Blocks.

        Raises:
            ValidationError: it cannot be used.
        """
        options = merged(self.options, json.loads(given.options or "{}"))
        frames = options.pop("num_frames", self.num_frames)
        is_video = given.kind == VIDEO
        head = json.dumps([given.kind, options, frames * is_video], sort_keys=True).encode()
        digest = blake2b(len(head).to_bytes(4, "little") + head, digest_size=20, person=b"quire media")  # fmt: skip
        digest.update(data)
        name = digest.hexdigest()
        if (picture := self.cache.get(scope, name)) is None:
            frames, most = (frames, self.most_rows) if is_video else (0, 0)
            made = self.processes.process(data, given.where, frames, most, options)
            picture = self._picture(name, given, made)
        self._keep(picture, given, scope)
        return picture

    def _keep(self, picture: ReadMedia, given: GivenMedia, scope: str) -> None:
        self.cache.put(scope, picture)
        if given.uuid:
            self.cache.name(scope, f"{given.uuid}\0{given.options}", picture.digest)

    def _blank(self, kind: str) -> ReadMedia:
        source = blank_pixels(kind)
        data = frames_as_file(source, kind) if kind == VIDEO else as_file(source, kind)
        return self.read(data, GivenMedia(kind, None, kind=kind))

    def _named(self, given: GivenMedia, scope: str) -> ReadMedia:
        """Raises ValidationError: no picture of this name is in the cache."""
        if (picture := self.cache.named(scope, f"{given.uuid}\0{given.options}")) is None:
            raise refused(
                given.where, "the server has no picture of this `uuid` (any more): send it again"
            )
        return picture

    def _check_number(self, given: Sequence[GivenMedia]) -> None:
        for kind, limit in self.limits.items():
            own = [one for one in given if one.kind == kind]
            if not limit:  # rows need no tower
                own = [one for one in own if not isinstance(one.source, GivenRows)]
            if own and kind == VIDEO and not self.takes_videos:
                raise refused(own[0].where, "this model takes pictures, and no videos")
            if len(own) > limit:
                name = "pictures" if kind == IMAGE else "videos"
                raise refused(
                    own[limit].where,
                    f"the request has {len(own)} {name}; the limit is {limit} (--limit-mm-per-prompt)",
                )

    def _files_of(self, given: Sequence[GivenMedia]) -> list[GivenMedia]:
        """Those that are files, or become one."""
        return [
            self._as_file(one)
            for one in given
            if one.source is not None and not isinstance(one.source, GivenRows)
        ]

    def _as_file(self, given: GivenMedia) -> GivenMedia:
        if isinstance(given.source, str | bytes):
            return given
        make = frames_as_file if given.kind == VIDEO else as_file
        return replace(given, source=make(given.source, given.where))

    def _picture(self, digest: str, given: GivenMedia, made: Processed) -> ReadMedia:
        kind, where = given.kind, given.where
        ids = self.tokenizer.encode(made.replacement, False)
        placeholder = next(one for one in self.placeholders.kinds if one.kind == kind)
        runs = runs_of(ids, placeholder.row_id)
        rows = sum(length for _, length in runs)
        if rows > self.most_rows:
            raise refused(
                where,
                f"the picture takes {rows} tokens; the limit is {self.most_rows} (--max-num-batched-tokens): send a smaller one",
            )
        if given.options and kind != VIDEO and rows > self.model.max_rows:
            raise refused(where, f"with these `mm_processor_kwargs` the picture takes {rows} tokens; this server plans for {self.model.max_rows} (--mm-processor-kwargs)")  # fmt: skip
        grids = self._grids(made, len(runs)) if self.model.has_grid else []
        if not rows or (grids and [prod(grid) for grid in grids] != [n for _, n in runs]):
            raise refused(
                where, "the model's processor gives no tokens for this picture: send another size"
            )
        text = re.sub(
            f"(?:{re.escape(placeholder.row)})+", lambda _: placeholder.row, made.replacement
        )
        interval = (
            made.seconds * self.model.tokens_per_second
            if made.seconds and self.model.tokens_per_second
            else 1.0
        )
        return ReadMedia(kind, digest, text, ids, runs, grids, made.tensors, interval)

    def _grids(self, made: Processed, runs: int) -> list[tuple[int, int, int]]:
        """Of each run of rows: some models have text between the times of a video."""
        name = next(name for name in made.tensors if name.endswith("_grid_thw"))
        t, h, w = np.frombuffer(made.tensors[name].data, np.int64).tolist()
        h, w = h // self.model.merge, w // self.model.merge
        return [(1, h, w)] * t if t == runs else [(t, h, w)]

    # -- placing ----------------------------------------------------------------------------------
    def tokenized(
        self,
        prompt: Prompt,
        pictures: Sequence[ReadMedia],
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
        self, prompt: Prompt, pictures: Sequence[ReadMedia], written: WrittenText | None = None
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


def files_of_one(given: GivenMedia, files: Iterator[File]) -> File | None:
    """The next file; None: the request gives rows."""
    return None if isinstance(given.source, GivenRows) else next(files)


def frames_as_file(source: Any, where: str) -> bytes:
    """Frames, as an array [N, H, W, 3] of uint8 or a list of such pictures; or (frames, metadata) with `fps` in the metadata: as a file of
    their own form (`video_frames.py`). Raises ValidationError: another object."""
    frames, metadata = source if isinstance(source, tuple) and len(source) == 2 else (source, None)
    if (
        isinstance(frames, list | tuple)
        and frames
        and all(hasattr(one, "convert") for one in frames)
    ):
        frames = [np.asarray(one.convert("RGB")) for one in frames]
    try:
        frames_NHWC = np.ascontiguousarray(frames)
    except ValueError:
        frames_NHWC = np.zeros(0)
    fps = metadata.get("fps") if isinstance(metadata, dict) else None
    if (
        frames_NHWC.dtype != np.uint8
        or frames_NHWC.ndim != 4
        or frames_NHWC.shape[3] != 3
        or not len(frames_NHWC)
    ):
        raise refused(
            where,
            "a video must be an array [frames, height, width, 3] of uint8, or a list of pictures of one size",
        )
    return packed_frames(frames_NHWC, float(fps or DEFAULT_FPS))


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
