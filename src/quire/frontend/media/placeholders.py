"""Placeholders of media in a prompt: replaced in its text by what the model's processor writes, and found again in its tokens.

    text of the template    [user]<image>What is it?                 one token stands for a picture
    written text            [user]\n\n<start><soft><end>\n\nWhat     what replaces it, with one token for each run of rows
    tokens                  ... <start> <soft> ... <soft> <end> ...   each run in full length

The text is written before it is tokenized, so that what replaces a placeholder joins its neighbours as it does in Transformers.
A text of the user that spells such a token stays text: it is marked before the chat template writes real ones, and becomes the
tokens of its letters. Knows texts and ids. Does not know what media are.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import Unsupported, ValidationError
from quire.frontend.media.content_parts import MediaPart
from quire.frontend.media.processed_cache import ReadMedia
from quire.frontend.tokenizer import Tokenizer
from quire.protocol.media import TowerInput, encode_input
from quire.protocol.request import MediaItem


@dataclass(frozen=True, slots=True)
class Placeholder:
    """How prompts name one kind of media.

    Attributes:
        kind: of its items (`MediaItem.kind`).
        token: what stands for an item in a prompt, and its id.
        row: what stands for one row of the tower in the prompt that the model reads; often the same.
    """

    kind: str
    token: str
    token_id: int
    row: str
    row_id: int


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A text to tokenize. `named`: for each token in it that names media, in order, what it is: the number of an item, of which
    it is one run of rows; a token that a user spelled; or None: itself."""

    text: str
    named: list[int | str | None]


class Placeholders:
    """Those of a model. Raises Unsupported: the tokenizer lacks one."""

    def __init__(self, kinds: Iterable[Placeholder], tokenizer: Tokenizer):
        self.kinds, self.tokenizer = list(kinds), tokenizer
        self.ids = {one.token: one.token_id for one in self.kinds}
        self.ids |= {one.row: one.row_id for one in self.kinds}
        for token, id in self.ids.items():
            if tokenizer.encode(token, False) != [id]:
                raise Unsupported(f"media with a tokenizer that has no token {token!r}", "send text")  # fmt: skip
        self.tokens = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.tokens)))
        self._of_token = {one.token: one for one in self.kinds}
        self._of_id = {one.token_id: one for one in self.kinds}
        self._rows = {one.kind: one for one in self.kinds}

    # -- in texts ---------------------------------------------------------------------------------
    def marked(self, value: Any, mark: str) -> Any:
        """A copy of JSON values with marks in the place of tokens in every text; parts of media stay what they are."""
        if isinstance(value, str):
            return self.pattern.sub(lambda found: self._mark(found[0], mark), value)
        if isinstance(value, MediaPart):
            return value
        if isinstance(value, dict):
            return {key: self.marked(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item, mark) for item in value]
        return value

    def _mark(self, token: str, mark: str) -> str:
        return f"{mark}{self.tokens.index(token)}m"

    def unmarked(self, text: str, mark: str) -> str:
        """The text as its reader expects it."""
        return re.sub(f"{mark}([0-9]+)m", lambda found: self.tokens[int(found[1])], text)

    def written(self, text: str, items: Sequence[ReadMedia], mark: str = "") -> WrittenText:
        """The text with what replaces each placeholder. `mark`: of tokens that users spelled; empty: there are none.

        Raises:
            ValidationError: it has another number of placeholders than items.
        """
        pattern = re.compile(f"{mark}[0-9]+m|{self.pattern.pattern}") if mark else self.pattern
        found = list(pattern.finditer(text))
        self._check((self._of_token[one[0]].kind for one in found if one[0] in self._of_token), items)  # fmt: skip
        rest = {kind: self._numbers(kind, items) for kind in self._rows}
        parts: list[str] = []
        named: list[int | str | None] = []
        start = 0
        for one in found:
            parts.append(text[start : one.start()])
            start, token = one.end(), one[0]
            if mark and token.startswith(mark):
                parts.append(spelled := self.tokens[int(token[len(mark) : -1])])
                named.append(spelled)
            elif (placeholder := self._of_token.get(token)) is not None:
                number = next(rest[placeholder.kind])
                parts.append(items[number].text)
                own = self.pattern.findall(items[number].text)
                named += [number if name == placeholder.row else None for name in own]
            else:
                parts.append(token)
                named.append(None)
        return WrittenText("".join([*parts, text[start:]]), named)

    @staticmethod
    def _numbers(kind: str, items: Sequence[ReadMedia]) -> Iterator[int]:
        return (number for number, item in enumerate(items) if item.kind == kind)

    def _check(self, kinds: Iterable[str], items: Sequence[ReadMedia]) -> None:
        """Raises ValidationError: as `written`."""
        written, given = Counter(kinds), Counter(item.kind for item in items)
        for kind in self._rows:
            if written[kind] != given[kind]:
                raise ValidationError(
                    f"the prompt has {written[kind]} placeholders for {given[kind]} items of the kind {kind}: each needs one."
                    " If the chat template writes them, it does not know such parts at this place (of a conversation: set"
                    " --chat-template-content-format string)",
                    parameter="messages",
                )  # fmt: skip

    # -- in tokens --------------------------------------------------------------------------------
    def expanded(
        self, tokens: Sequence[int], named: Sequence[int | str | None], items: Sequence[ReadMedia]
    ) -> tuple[list[int], list[MediaItem]]:
        """The tokens of a written text with all rows, and where the items are.

        Raises:
            ValidationError: the tokenizer reads other tokens than those that were written.
        """
        wanted = set(self.ids.values())
        places = [at for at, token in enumerate(tokens) if token in wanted]
        if len(places) != len(named):
            raise ValidationError("the tokenizer changes the placeholders of media in this prompt")
        out: list[int] = []
        runs: dict[int, list[tuple[int, int]]] = {}
        start = 0
        for at, name in zip(places, named, strict=True):
            out += tokens[start:at]
            start = at + 1
            if name is None:
                out.append(tokens[at])
            elif isinstance(name, str):
                out += self._letters(name)
            else:
                item, own = items[name], runs.setdefault(name, [])
                own.append((len(out), item.runs[len(own)][1]))
                out += [tokens[at]] * own[-1][1]
        return out + list(tokens[start:]), [_placed(items[name], own) for name, own in runs.items()]

    def expanded_ids(
        self, tokens: Sequence[int], items: Sequence[ReadMedia]
    ) -> tuple[list[int], list[MediaItem]]:
        """As `expanded`, of a prompt whose tokens have one placeholder for each item.

        Raises:
            ValidationError: as `written`.
        """
        places = [at for at, token in enumerate(tokens) if token in self._of_id]
        self._check((self._of_id[tokens[at]].kind for at in places), items)
        rest = {kind: self._numbers(kind, items) for kind in self._rows}
        out: list[int] = []
        placed: list[MediaItem] = []
        start = 0
        for at in places:
            out += tokens[start:at]
            start = at + 1
            item = items[next(rest[self._of_id[tokens[at]].kind])]
            placed.append(_placed(item, [(len(out) + first, length) for first, length in item.runs]))  # fmt: skip
            out += item.ids
        return out + list(tokens[start:]), placed

    def _letters(self, token: str) -> list[int]:
        """The tokens of a text that spells a token."""
        encode = self.tokenizer.encode
        return encode(token[:1], False) + encode(token[1:], False)


def _placed(item: ReadMedia, runs: list[tuple[int, int]]) -> MediaItem:
    """`runs`: (index in the prompt, length)."""
    start, end = runs[0][0], sum(runs[-1])
    own = [(at - start, length) for at, length in runs]
    data = encode_input(TowerInput(own, item.grids, item.tensors, item.interval))
    return MediaItem(item.digest, item.kind, start, end - start, data)


def new_mark() -> str:
    """A word that no request contains; letters and digits only, which templates and JSON leave as they are."""
    return f"m{secrets.token_hex(12)}m"


def media_in(messages: Any) -> list[ReadMedia]:
    """The items of messages, in the order in which a template writes their placeholders."""
    found: list[ReadMedia] = []
    if isinstance(messages, MediaPart):
        found.append(messages.item)
    elif isinstance(messages, dict):
        for item in messages.values():
            found += media_in(item)
    elif isinstance(messages, list):
        for item in messages:
            found += media_in(item)
    return found


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
