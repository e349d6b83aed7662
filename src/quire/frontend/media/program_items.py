"""Pictures, videos and sound in the prompts of a program: `multi_modal_data`, with `multi_modal_uuids` and `mm_processor_kwargs`.

Knows the forms of these dicts. Does not read any file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.picture_options import picture_options
from quire.errors import Unsupported, ValidationError
from quire.frontend.media.content_parts import MOST_UUID, GivenMedia
from quire.frontend.media.given_rows import rows_of_program
from quire.protocol.media import AUDIO, IMAGE, KINDS


def given_items(media: Any, uuids: Any = None, options: str = "") -> list[GivenMedia]:
    """All that `multi_modal_data` has: one or a list under each of "image", "video" and "audio". `options`: of all pictures and videos.

    Raises:
        ValidationError, Unsupported: another kind of media, or names that do not fit.
    """
    if not media:
        return []
    if not isinstance(media, Mapping):
        raise ValidationError(
            'multi_modal_data must be a dict such as {"image": picture}',
            parameter="multi_modal_data",
        )
    if not isinstance(uuids, Mapping | None):
        raise _wrong_names('must be a dict such as {"image": ["a name", None]}')
    found: list[GivenMedia] = []
    for kind, value in media.items():
        if value is None or (isinstance(value, list) and not value):
            continue
        if kind not in KINDS:
            raise Unsupported(f"multi_modal_data of the kind {kind}", "pass image, video or audio")
        items = _items(kind, value)
        for index, (item, uuid) in enumerate(
            zip(items, _names(kind, uuids, len(items)), strict=True)
        ):
            if item is None and not uuid:
                raise ValidationError(f"multi_modal_data.{kind}[{index}] is None: give it a name of an earlier one in multi_modal_uuids", parameter="multi_modal_data")  # fmt: skip
            where = f"multi_modal_data.{kind}[{index}]"
            found.append(GivenMedia(where, item, uuid, kind, options if kind != AUDIO else ""))
    return found


def options_text(options: Any) -> str:
    """`mm_processor_kwargs` as JSON; empty: none. Raises ValidationError: a key or value that is not taken."""
    if not options:
        return ""
    try:
        return json.dumps(picture_options(options), sort_keys=True)
    except ValueError as why:
        raise ValidationError(f"mm_processor_kwargs: {why}", parameter="mm_processor_kwargs") from None  # fmt: skip


def _items(kind: str, value: Any) -> list[Any]:
    if kind == AUDIO:
        return list(value) if _is_list(kind, value) else [value]
    if (rows := rows_of_program(kind, value)) is not None:
        return list(rows)
    found: list[Any] = []
    for one in value if _is_list(kind, value) else [value]:
        rows = None if isinstance(one, tuple) else rows_of_program(kind, one)
        found += [one] if rows is None else rows
    return found


def _names(kind: str, uuids: Mapping[str, Any] | None, count: int) -> list[str]:
    """Of each item of a kind; empty: none. Raises ValidationError: another number of names, or no names."""
    given = (uuids or {}).get(kind)
    if given is None:
        return [""] * count
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or len(names) != count:
        raise _wrong_names(f"needs a name, or None, for each of the {count} items of the kind {kind}")  # fmt: skip
    if any(name is not None and not (isinstance(name, str) and 0 < len(name) <= MOST_UUID) for name in names):  # fmt: skip
        raise _wrong_names(f"has names that are not strings of 1 to {MOST_UUID} characters")
    return [name or "" for name in names]


def _wrong_names(why: str) -> ValidationError:
    return ValidationError(f"multi_modal_uuids {why}", parameter="multi_modal_uuids")


def _is_list(kind: str, value: Any) -> bool:
    """Whether it is several items. A video may itself be a list of pictures, or (frames, metadata); a sound a list of samples, or
    (samples, rate)."""
    if kind == IMAGE:
        return isinstance(value, list | tuple)
    if kind == AUDIO:
        return isinstance(value, list) and not isinstance(value[0], int | float)
    return (
        isinstance(value, list)
        and not hasattr(value[0], "convert")
        and getattr(value[0], "ndim", 4) != 3
    )


def with_options(prompts: list[Any], options: Any) -> list[Any]:
    """The prompts, with `mm_processor_kwargs` of a call for those that have none of their own. Raises ValidationError: as `options_text`."""
    if text := options_text(options):
        for prompt in prompts:
            prompt.items = [
                one if one.kind == AUDIO else replace(one, options=one.options or text)
                for one in prompt.items
            ]
    return prompts
