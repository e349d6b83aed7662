"""Pictures, videos and sound of requests, from what a request gives to what the engine takes.

    given     GivenMedia   a URL, bytes, or an object of Pillow or numpy
    fetched   bytes          `fetch.py`, in the event loop
    read      ReadMedia    decoded and processed in another process, or found in the cache
    placed    TowerInput     its tokens are in the prompt

Knows these steps and their limits. Does not know HTTP routes, or the engine.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np

from quire import env
from quire.config.engine import Resolved
from quire.config.picture_options import merged
from quire.errors import QueueFull, Unsupported, ValidationError
from quire.frontend.media.content_parts import GivenMedia
from quire.frontend.media.errors import refused
from quire.frontend.media.fetch import Fetcher, File
from quire.frontend.media.given_rows import GivenRows
from quire.frontend.media.media_messages import Processed
from quire.frontend.media.media_processes import MediaProcesses
from quire.frontend.media.placeholders import Placeholder, Placeholders, WrittenText, runs_of
from quire.frontend.media.processed_cache import ProcessedCache, ReadMedia
from quire.frontend.media.row_inputs import RowInputs, blank_pixels
from quire.frontend.media.sound_inputs import MIB
from quire.frontend.media.sound_inputs import as_file as sound_as_file
from quire.frontend.media.video_frames import DEFAULT_FPS, packed_frames
from quire.frontend.prompts import Prompt
from quire.frontend.tokenizer import Tokenizer
from quire.models.media import MediaModel, most_rows, why_no_media
from quire.protocol.media import AUDIO, IMAGE, VIDEO

GIB = 1 << 30
Observe = Callable[[str, str, float], None]
"""(kind, outcome, seconds): fetched, processed, cached, named, embedded or refused. `fetched` is once for all items of a request."""
MOST_WAITING = 256  # items of all requests that wait for a process
NAMES = {IMAGE: "pictures", VIDEO: "videos", AUDIO: "sounds"}


class MediaInputs:
    """One for each frontend. `load` is for its event loop; all else may be called from any thread.

    Raises:
        Unsupported: the tokenizer does not have the model's token of a picture or of sound.
    """

    def __init__(self, model: MediaModel, resolved: Resolved, tokenizer: Tokenizer):
        media = resolved.config.media
        self.model, self.tokenizer, self.num_frames = model, tokenizer, media.num_frames
        self.most_rows = most_rows(resolved, model)
        self.options, self.in_place = media.mm_processor_kwargs, media.interleave_mm_strings
        self.trusts_requests = media.trust_request_mm_kwargs
        self.rows: RowInputs | None = None
        if model.vision is not None:
            self.rows = RowInputs(model.vision, self.most_rows, media.enable_mm_embeds, self._blank)
        kinds, texts = self._placeholders(tokenizer)
        self.placeholders = Placeholders(kinds, tokenizer)
        self.texts = {one.kind: texts[one.kind] or one.token for one in kinds}
        """What stands for an item in a text, by kind."""
        self.limits = {IMAGE: media.max_pictures, VIDEO: media.max_videos, AUDIO: media.max_sounds}
        self.refusals = why_no_media(resolved)
        """By kind: why this server takes none; empty: it does."""
        self.fetcher = Fetcher(media)
        folder = resolved.tokenizer_folder
        self.processes = MediaProcesses(resolved.path, options=self.options, kinds=list(self.texts), tokenizer=folder)  # fmt: skip
        fronts = max(1, resolved.config.server.api_server_count or 1)
        self.cache = ProcessedCache(int(media.mm_processor_cache_gb * GIB) // fronts)
        self._threads = ThreadPoolExecutor(self.processes.count, "media")
        self.observe: Observe = lambda kind, outcome, seconds: None
        """Counts items, and how long they took."""
        self._waiting = 0

    def _placeholders(self, tokenizer: Tokenizer) -> tuple[list[Placeholder], dict[str, str]]:
        """(of each kind that the model takes, what stands for an item in a text by kind). Raises Unsupported: as the class."""
        vision, audio = self.model.vision, self.model.audio
        found, texts = list[Placeholder](), dict[str, str]()
        if vision is not None:
            found.append(_placeholder(IMAGE, vision.image_token_id, vision.token, tokenizer))
            id = vision.video_token_id
            if id is not None and (token := tokenizer.token(id)) is not None:
                found.append(_placeholder(VIDEO, vision.video_row_id or id, token, tokenizer))
            texts |= {IMAGE: vision.placeholder, VIDEO: vision.video_placeholder}
        if audio is not None:
            found.append(_placeholder(AUDIO, audio.token_id, "", tokenizer))
            texts[AUDIO] = audio.placeholder
        return found, texts

    def prepare(self) -> None:
        """Start a process before the first file comes; does not wait for it."""
        self._threads.submit(self.processes.prepare)

    # -- reading ----------------------------------------------------------------------------------
    async def load(self, given: Sequence[GivenMedia], scope: str = "") -> list[ReadMedia]:
        """Fetch and process the items of a request. `scope`: see `ProcessedCache.get`.

        Raises:
            ValidationError, NotFetched: an item cannot be used; the error names its place.
            QueueFull: too many items wait.
        """
        self._check_number(given)
        named = [self._named(one, scope) if one.source is None else None for one in given]
        began = time.monotonic()
        files = iter(await self.fetcher.fetch(self._files_of(given)))
        self.observe(given[0].kind, "fetched", time.monotonic() - began)
        count = sum(found is None for found in named)
        if self._waiting + count > MOST_WAITING:
            raise QueueFull(f"{self._waiting} files wait to be decoded; try again later")
        loop = asyncio.get_running_loop()
        self._waiting += count
        try:
            missing = [one for one, found in zip(given, named, strict=True) if found is None]
            pairs = [(one, files_of_one(one, files)) for one in missing]
            work = [loop.run_in_executor(self._threads, self._read, *each, scope) for each in pairs]
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
        if self.rows is None:
            raise refused(given.where, "this model has no vision tower")
        picture = self.rows.read(given, given.source)
        self.observe(given.kind, "embedded", 0.0)
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
            began = time.monotonic()
            try:
                if given.kind == AUDIO:
                    made = self._heard(data, given.where)
                else:
                    made = self.processes.process(data, given.where, frames, most, options)
                picture = self._placeable(name, given, made)
            except ValidationError:
                self.observe(given.kind, "refused", time.monotonic() - began)
                raise
            self.observe(given.kind, "processed", time.monotonic() - began)
        else:
            self.observe(given.kind, "cached", 0.0)
        self._keep(picture, given, scope)
        return picture

    def _heard(self, data: File, where: str) -> Processed:
        most, audio = int(env.get("MAX_AUDIO_CLIP_FILESIZE_MB")), self.model.audio
        if len(data) > most * MIB:
            raise refused(where, f"the file has {len(data)} bytes; the limit is {most} MiB (QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB)")  # fmt: skip
        made = self.processes.hear(data, where, float(env.get("MAX_AUDIO_DECODE_DURATION_S")))
        if audio is not None and made.seconds > audio.most_seconds:
            raise refused(where, f"the sound has {made.seconds:.1f} s, and the model hears {audio.most_seconds:g} s at once: send it in parts")  # fmt: skip
        return made

    def _keep(self, picture: ReadMedia, given: GivenMedia, scope: str) -> None:
        self.cache.put(scope, picture)
        if given.uuid:
            self.cache.name(scope, f"{given.uuid}\0{given.options}", picture.digest)

    def _blank(self, kind: str) -> ReadMedia:
        source = blank_pixels(kind)
        data = frames_as_file(source, kind) if kind == VIDEO else as_file(source, kind)
        return self.read(data, GivenMedia(kind, None, kind=kind))

    def _named(self, given: GivenMedia, scope: str) -> ReadMedia:
        """Raises ValidationError: no item of this name and kind is in the cache."""
        found = self.cache.named(scope, f"{given.uuid}\0{given.options}")
        if found is None or found.kind != given.kind:
            raise refused(
                given.where, "the server has no item of this `uuid` (any more): send it again"
            )
        self.observe(given.kind, "named", 0.0)
        return found

    def check_number(self, media: Sequence[ReadMedia], where: str) -> None:
        """Raises ValidationError: a conversation has more items than a request may have."""
        self._check_number([GivenMedia(where, None, kind=one.kind) for one in media])

    def _check_number(self, given: Sequence[GivenMedia]) -> None:
        for kind, limit in self.limits.items():
            own = [one for one in given if one.kind == kind]
            if not limit:  # rows need no tower
                own = [one for one in own if not isinstance(one.source, GivenRows)]
            if own and kind not in self.texts:
                takes = " and ".join(NAMES[one] for one in self.texts)
                why = self.refusals[kind] or f"this model takes {takes}, and no {NAMES[kind]}"
                raise refused(own[0].where, why)
            if len(own) > limit:
                raise refused(
                    own[limit].where,
                    f"the request has {len(own)} {NAMES[kind]}; the limit is {limit} (--limit-mm-per-prompt)",
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
        make = {VIDEO: frames_as_file, AUDIO: sound_as_file}.get(given.kind, as_file)
        return replace(given, source=make(given.source, given.where))

    def _placeable(self, digest: str, given: GivenMedia, made: Processed) -> ReadMedia:
        kind, where = given.kind, given.where
        ids = self.tokenizer.encode(made.replacement, False)
        placeholder = next(one for one in self.placeholders.kinds if one.kind == kind)
        runs = runs_of(ids, placeholder.row_id)
        rows = sum(length for _, length in runs)
        if rows > self.most_rows:
            raise refused(
                where,
                f"the item takes {rows} tokens; the limit is {self.most_rows} (--max-num-batched-tokens): send a smaller one",
            )
        vision = None if kind == AUDIO else self.model.vision
        if vision and given.options and kind != VIDEO and rows > vision.max_rows:
            raise refused(where, f"with these `mm_processor_kwargs` the picture takes {rows} tokens; this server plans for {vision.max_rows} (--mm-processor-kwargs)")  # fmt: skip
        if not rows and kind == AUDIO:
            raise refused(where, "the sound is too short: the model gets no token of it")
        grids = self._grids(made, len(runs), vision.merge) if vision and vision.has_grid else []
        if not rows or (grids and [prod(grid) for grid in grids] != [n for _, n in runs]):
            raise refused(
                where, "the model's processor gives no tokens for this picture: send another size"
            )
        text = re.sub(
            f"(?:{re.escape(placeholder.row)})+", lambda _: placeholder.row, made.replacement
        )
        interval = made.seconds * (vision.tokens_per_second if vision else 0.0) or 1.0
        return ReadMedia(kind, digest, text, ids, runs, grids, made.tensors, interval)

    @staticmethod
    def _grids(made: Processed, runs: int, merge: int) -> list[tuple[int, int, int]]:
        """Of each run of rows: some models have text between the times of a video."""
        name = next(name for name in made.tensors if name.endswith("_grid_thw"))
        t, h, w = np.frombuffer(made.tensors[name].data, np.int64).tolist()
        h, w = h // merge, w // merge
        return [(1, h, w)] * t if t == runs else [(t, h, w)]

    # -- placing ----------------------------------------------------------------------------------
    def tokenized(
        self,
        prompt: Prompt,
        items: Sequence[ReadMedia],
        tokenize: Callable[[Prompt], Prompt],
        mark: str = "",
    ) -> Prompt:
        """The prompt, of text or tokens, with the items' own tokens. `mark`: of tokens that users spelled.

        Raises:
            ValidationError: as `placed`; and what `tokenize` raises.
        """
        if prompt.tokens or prompt.text is None:
            tokens = Prompt(prompt.text, prompt.tokens, prompt.salt)
            return self.placed(tokenize(tokens), items)
        written = self.written(prompt.text, items, mark)
        found = tokenize(Prompt(written.text, salt=prompt.salt))
        found.text = self.placeholders.unmarked(prompt.text, mark) if mark else prompt.text
        return self.placed(found, items, written)

    def written(self, text: str, items: Sequence[ReadMedia], mark: str = "") -> WrittenText:
        """As `Placeholders.written`, with what the model's processor writes around a text."""
        vision = self.model.vision
        if vision is not None and vision.is_prefix and items:
            token = self.texts[IMAGE]
            at = text.rfind(token) + len(token) if token in text else 0
            text = f"{text[:at]}{self.tokenizer.bos_token or ''}{text[at:]}\n"
        return self.placeholders.written(text, items, mark)

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer's own tokens are around a text with items."""
        return self.model.vision is None or not self.model.vision.is_prefix

    def placed(
        self, prompt: Prompt, items: Sequence[ReadMedia], written: WrittenText | None = None
    ) -> Prompt:
        """The prompt with the items' own tokens. `written`: the text of its tokens; None: they have one placeholder for each item.

        Raises:
            ValidationError: it has another number of placeholders.
        """
        if written is None:
            tokens, media = self.placeholders.expanded_ids(prompt.tokens, items)
        else:
            tokens, media = self.placeholders.expanded(prompt.tokens, written.named, items)
        return Prompt(prompt.text, tokens, prompt.salt, media=media)


def files_of_one(given: GivenMedia, files: Iterator[File]) -> File | None:
    """The next file; None: the request gives rows."""
    return None if isinstance(given.source, GivenRows) else next(files)


def _placeholder(kind: str, row_id: int, token: str, tokenizer: Tokenizer) -> Placeholder:
    """`token`: what stands for an item in a prompt; empty: the token of a row. Raises Unsupported: the tokenizer lacks one."""
    row = tokenizer.token(row_id)
    if row is None:
        raise Unsupported(f"{NAMES[kind]} with a tokenizer that has no token {row_id}", "send text")
    ids = tokenizer.encode(token or row, False)
    if len(ids) != 1:
        raise Unsupported(f"{NAMES[kind]} with a tokenizer that has no token {token!r}", "send text")  # fmt: skip
    return Placeholder(kind, token or row, ids[0], row, row_id)


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
