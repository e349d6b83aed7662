"""Content parts of messages that are pictures, videos or sound: the one parser of OpenAI's, the Responses and Anthropic's forms.

    chat       {"type": "image_url", "image_url": {"url": U}}, or U itself in place of the object
    Responses  {"type": "input_image", "image_url": U}
    Anthropic  {"type": "image", "source": {"type": "url", "url": U}} or {"type": "base64", "data": D}
    Python     {"type": "image_pil", "image_pil": IMAGE}
    videos     {"type": "video_url", "video_url": {"url": U}}, or U itself
    rows       {"type": "image_embeds", "image_embeds": B} or {"image_embeds": B, "image_grid_thw": [T, H, W]} in the place of B; video_embeds
    sound      {"type": "audio_url", "audio_url": {"url": U}}, or U itself
               {"type": "input_audio", "input_audio": {"data": D, "format": "wav"}}

`find_parts` finds them in the messages of any of these, with their JSON paths; each is then replaced by a `MediaPart`, which
the protocols hand on as a part of type image. Knows parts. Does not know what a URL names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from quire.frontend.media.errors import refused
from quire.frontend.media.given_rows import GivenRows
from quire.protocol.media import AUDIO, IMAGE, VIDEO

ROWS = {"image_embeds": IMAGE, "video_embeds": VIDEO}
URLS = {"video_url": VIDEO, "audio_url": AUDIO}
KINDS = ("image_url", "input_image", "image", "image_pil", "input_audio", *URLS, *ROWS)
OTHER_MEDIA = ("input_video", "audio_embeds", "input_file", "file")
INSIDE = ("content", "output")
"""Keys of a part or message whose value is a list of parts."""
MOST_DEEP = 4
MOST_UUID = 128
DETAILS = (None, "auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class GivenMedia:
    """A picture, a video or a sound as a request gives it.

    Attributes:
        where: its JSON path.
        source: a URL, the object of a Python program, or GivenRows; None: the item that had this uuid before.
        uuid: a name of the client for the item; empty: none.
        kind: IMAGE, VIDEO or AUDIO.
        options: of its processing (`config/picture_options.py`), as JSON; empty: the engine's.
    """

    where: str
    source: Any
    uuid: str = ""
    kind: str = IMAGE
    options: str = ""


class MediaPart(dict[str, Any]):
    """A content part of type image, video or audio whose item has been read. Clients cannot send one: JSON has no such class."""

    def __init__(self, item: Any):
        super().__init__(type=getattr(item, "kind", IMAGE))
        self.item = item


@dataclass(slots=True)
class PartPlace:
    """Where a part is: put its replacement into `parts[index]`."""

    parts: list[Any]
    index: int
    given: GivenMedia


def find_parts(
    messages: Any, name: str, *, local: bool = False, options: str = ""
) -> list[PartPlace]:
    """The pictures, videos and sounds in messages, or in one, in order. `name`: of the field that has them. `local`: of a Python program. `options`: of their processing.

    Raises:
        ValidationError: a part is malformed, or a kind of media that is not supported.
    """
    found = list(_in_list(messages, name, local, 0)) if isinstance(messages, list) else []
    if isinstance(messages, dict) and isinstance(parts := messages.get("content"), list):
        found = list(_in_list(parts, f"{name}.content", local, 1))
    for place in found if options else ():
        if place.given.kind != AUDIO:
            place.given = replace(place.given, options=options)
    return found


def copied_parts(value: Any) -> Any:
    """A copy of the dicts and lists of messages, whose other values are shared."""
    if isinstance(value, dict):
        return {key: copied_parts(item) for key, item in value.items()}
    return [copied_parts(item) for item in value] if isinstance(value, list) else value


def _in_list(items: list[Any], where: str, local: bool, depth: int) -> Iterator[PartPlace]:
    for index, item in enumerate(items):
        if not isinstance(item, dict) or isinstance(item, MediaPart):
            continue
        place = f"{where}[{index}]"
        if depth and (given := read_part(item, place, local)) is not None:
            yield PartPlace(items, index, given)
            continue
        for key in INSIDE:
            if depth < MOST_DEEP and isinstance(inner := item.get(key), list):
                yield from _in_list(inner, f"{place}.{key}", local, depth + 1)


def read_part(part: dict[str, Any], where: str, local: bool = False) -> GivenMedia | None:
    """The item of a part; None: it has none. Raises ValidationError: as `find_parts`."""
    kind = part.get("type")
    if kind in OTHER_MEDIA:
        raise refused(
            where,
            f"parts of type {kind!r} are not supported yet: send image_url, video_url, audio_url or input_audio",
        )
    if kind is None and "image_url" in part:
        kind = "image_url"
    if kind not in KINDS or (kind == "image_pil" and not local):
        return None
    uuid = _uuid(part, where)
    if kind == "image_pil":
        return GivenMedia(
            where if part.get("image_pil") is None else f"{where}.image_pil",
            part.get("image_pil"),
            uuid,
        )
    if kind == "image":
        return _of_anthropic(part, where) if "source" in part else None
    if kind in URLS:
        return _of_url(part, where, uuid, kind)
    if kind in ROWS:
        return _of_rows(part, where, uuid, kind)
    if kind == "input_audio":
        return _of_data(part, where, uuid)
    url = part.get("image_url")
    if uuid and (url is None or url == {"url": None}):
        return GivenMedia(where, None, uuid)
    detail = part.get("detail")
    if isinstance(url, dict):
        detail, url, where = url.get("detail", detail), url.get("url"), f"{where}.image_url.url"
    else:
        where = f"{where}.image_url"
    if detail not in DETAILS:
        raise refused(where, "`detail` must be auto, low or high (it has no effect)")
    return GivenMedia(where, _text(url, where), uuid)


def _of_url(part: dict[str, Any], where: str, uuid: str, key: str) -> GivenMedia:
    url, where_url = part.get(key), f"{where}.{key}"
    if uuid and (url is None or url == {"url": None}):
        return GivenMedia(where, None, uuid, URLS[key])
    if isinstance(url, dict):
        url, where_url = url.get("url"), f"{where_url}.url"
    return GivenMedia(where_url, _text(url, where_url), uuid, URLS[key])


def _of_data(part: dict[str, Any], where: str, uuid: str) -> GivenMedia:
    """Of OpenAI's form. The first bytes of the file say what it is, so its `format` has no effect."""
    given, where = part.get("input_audio"), f"{where}.input_audio"
    if uuid and given is None:
        return GivenMedia(where, None, uuid, AUDIO)
    if not isinstance(given, dict):
        raise refused(where, "must be an object with data (the file in base64) and format")
    if not isinstance(given.get("format"), str | None):
        raise refused(f"{where}.format", "must be a string, such as wav or mp3")
    data, where = given.get("data"), f"{where}.data"
    if not isinstance(data, str) or not data:
        raise refused(where, "must be a sound file in base64")
    return GivenMedia(where, f"data:;base64,{data}", uuid, AUDIO)


def _of_rows(part: dict[str, Any], where: str, uuid: str, name: str) -> GivenMedia:
    given, kind = part.get(name), ROWS[name]
    if uuid and given is None:
        return GivenMedia(where, None, uuid, kind)
    where = f"{where}.{name}"
    fields = given if isinstance(given, dict) else {name: given}
    known = {name, f"{kind}_grid_thw", "second_per_grid_ts"}
    if not isinstance(fields.get(name), str) or fields.keys() - known:
        raise refused(where, f"must be base64 of safetensors or NumPy's format, or an object with {', '.join(sorted(known))}")  # fmt: skip
    rows = GivenRows(fields[name], fields.get(f"{kind}_grid_thw"), fields.get("second_per_grid_ts"))
    return GivenMedia(where, rows, uuid, kind)


def _of_anthropic(part: dict[str, Any], where: str) -> GivenMedia:
    source, where = part.get("source"), f"{where}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("url", "base64"):
        raise refused(where, "must be an object of type url or base64; files are not stored here")
    if kind == "url":
        return GivenMedia(f"{where}.url", _text(source.get("url"), f"{where}.url"))
    data = _text(source.get("data"), f"{where}.data")
    return GivenMedia(f"{where}.data", f"data:;base64,{data}")


def _uuid(part: dict[str, Any], where: str) -> str:
    uuid = part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= MOST_UUID):
        raise refused(where, f"`uuid` must be a string of 1 to {MOST_UUID} characters")
    return uuid or ""


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise refused(where, "must be a URL: data:image/png;base64,..., http:// or https://")
    return value
