"""Placeholders of pictures in a prompt: found in its text, expanded in its tokens.

A text of the user that spells a placeholder stays text: it is marked before the chat template writes real ones, and its
token is replaced by the tokens of its letters. Knows texts and ids. Does not know what pictures are.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from quire.errors import ValidationError
from quire.frontend.media.content_parts import PicturePart
from quire.frontend.media.processed_cache import ReadPicture
from quire.protocol.media import IMAGE, Picture, encode_picture
from quire.protocol.request import MediaItem


def new_mark() -> str:
    """A word that no request contains; letters and digits only, which templates and JSON leave as they are."""
    return f"m{secrets.token_hex(12)}m"


def marked(value: Any, token: str, mark: str) -> Any:
    """A copy of JSON values with `mark` in the place of `token` in every text; picture parts stay what they are."""
    if isinstance(value, str):
        return value.replace(token, mark)
    if isinstance(value, PicturePart):
        return value
    if isinstance(value, dict):
        return {key: marked(item, token, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [marked(item, token, mark) for item in value]
    return value


def unmarked(text: str, token: str, mark: str) -> tuple[str, list[bool]]:
    """The text with `token` in the place of each mark; and for each token in it, in order, whether it was a mark."""
    found = re.findall(f"{re.escape(token)}|{mark}", text)
    return text.replace(mark, token), [one == mark for one in found]


def pictures_in(messages: Any) -> list[ReadPicture]:
    """The pictures of messages, in the order in which a template writes their placeholders."""
    found: list[ReadPicture] = []
    if isinstance(messages, PicturePart):
        found.append(messages.picture)
    elif isinstance(messages, dict):
        for item in messages.values():
            found += pictures_in(item)
    elif isinstance(messages, list):
        for item in messages:
            found += pictures_in(item)
    return found


def expanded(
    tokens: Sequence[int], token_id: int, pictures: Sequence[ReadPicture], spelled: Sequence[bool],
    letters: Sequence[int],
) -> tuple[list[int], list[MediaItem]]:  # fmt: skip
    """The prompt's tokens with each picture's own in the place of its placeholder, and where these are.

    Args:
        token_id: of a placeholder.
        spelled: for each placeholder in order, whether it is text of the user; shorter: the others are not.
        letters: the tokens of such a text.

    Raises:
        ValidationError: the prompt has another number of placeholders than pictures.
    """
    places = [at for at, token in enumerate(tokens) if token == token_id]
    texts = [at < len(spelled) and spelled[at] for at in range(len(places))]
    if len(places) - sum(texts) != len(pictures):
        raise ValidationError(
            f"the prompt has {len(places) - sum(texts)} placeholders for {len(pictures)} pictures: each picture needs one."
            " If the chat template writes them, it does not know pictures at this place (of a conversation: set"
            " --chat-template-content-format string)",
            parameter="messages",
        )  # fmt: skip
    out: list[int] = []
    placed: list[MediaItem] = []
    rest, start = iter(pictures), 0
    for at, is_text in zip(places, texts, strict=True):
        out += tokens[start:at]
        start = at + 1
        if is_text:
            out += letters
            continue
        picture = next(rest)
        data = encode_picture(Picture(picture.runs, picture.grid, picture.tensors))
        placed.append(MediaItem(picture.digest, IMAGE, len(out), len(picture.ids), data))
        out += picture.ids
    return out + list(tokens[start:]), placed


def runs_of(ids: Sequence[int], token_id: int) -> list[tuple[int, int]]:
    """(offset, length) of the neighbouring tokens that are this one."""
    runs: list[tuple[int, int]] = []
    for at, token in enumerate(ids):
        if token != token_id:
            continue
        if runs and sum(runs[-1]) == at:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((at, 1))
    return runs
