"""Token deltas -> text deltas: never half a character, never text that a stop string may still take back.

    token ids -> pieces of text (`TokenPieces`) -> text that may be shown (`StopStrings` holds back the rest)

The result does not depend on how the tokens were cut into deltas. Knows a tokenizer and stop strings. Does not
know requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from quire.frontend.bytes_in_tokens import byte_token
from quire.frontend.tokenizer import Tokenizer

CONTEXT = 6  # tokens of the prompt that the first output tokens are decoded after
MOST_TABLES = 128  # of stop strings, kept for the next output that has the same
MOST_HELD = 8  # tokens that may wait for the rest of a character (of at most four bytes)
UNKNOWN = "\ufffd"


class TokenPieces(Protocol):
    def add(self, token_id: int) -> str:
        """The text that is certain after this token and was not before."""

    def end(self) -> str:
        """Text that was waiting for more and is whole characters all the same."""


class BytePieces:
    """For byte-level vocabularies: exact, one table look-up a token that is whole characters."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special: bool):
        self.tokenizer, self.skip = (
            tokenizer,
            tokenizer.special_ids if skip_special else frozenset(),
        )
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.cut = False
        """Inside a character."""
        self._decode(*context[-CONTEXT:])

    def add(self, token_id: int) -> str:
        if token_id in self.skip:
            return ""
        if not self.cut and (text := self.tokenizer.whole_text(token_id)) is not None:
            return text
        return self._decode(token_id)

    def _decode(self, *token_ids: int) -> str:
        raw = [self.tokenizer.raw_bytes(token_id) or b"" for token_id in token_ids]
        text = self.decoder.decode(b"".join(raw))
        self.cut = bool(self.decoder.getstate()[0])
        return text

    def end(self) -> str:
        return ""  # what is left is the beginning of a character


class WindowPieces:
    """For any other vocabulary: decodes a short window twice, without and with what is new.

        ids     ... a b c | d e
                    ^ start ^ read        the text of d e is decode(a b c d e) less decode(a b c)

    Decoders look at a token's neighbours (to strip a first space, to join bytes), and the window gives
    them some.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int],
        skip_special: bool,
        spaces_between_special: bool = True,
    ):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self.suppress_spaces = not (skip_special or spaces_between_special)
        start = max(0, len(context) - CONTEXT)
        while start and 0x80 <= (self._byte(context[start]) or 0) < 0xC0:
            start -= 1  # not from within a character
        self.ids = list(context[start:])
        self.last, self.read = 0, len(self.ids)  # where the previous advance began, where it ended
        self.known = self._decode(self.ids)
        while self.known.endswith(UNKNOWN) and self._byte(self.ids[self.read - 1]) is not None:
            self.read -= 1  # the context ends inside a character: the output completes it
            self.known = self._decode(self.ids[: self.read])

    def _byte(self, token_id: int) -> int | None:
        return byte_token(self.tokenizer.token(token_id))

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special)

    def add(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self._decode(self.ids)
        held = len(self.ids) - self.read
        if len(text) <= len(self.known) or (text.endswith(UNKNOWN) and held < MOST_HELD):
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        new = text[len(self.known) :]
        held, before = self.ids[self.read :], self.ids[: self.read]
        added = self.tokenizer.is_added
        if self.suppress_spaces and before and added(before[-1]) and added(held[0]):
            new = new.removeprefix(" ")
        # What was new and what was new before it stay, so that the next token has neighbours. Cutting
        # there cuts between characters.
        self.ids = before[self.last :] + held
        self.last, self.read = len(self.ids) - len(held), len(self.ids)
        self.known = self._decode(self.ids)
        return new

    def end(self) -> str:
        held = self.ids[self.read :]
        if not held:
            return ""
        text = self._decode(self.ids)
        if self._byte(held[-1]) is not None:
            text = text.rstrip(UNKNOWN)  # the beginning of a character
        return text[len(self.known) :]


@dataclass(slots=True)
class StopMatch:
    """A stop string in the text: it begins at `start` and ends before `end`."""

    text: str
    start: int
    end: int


class StopStrings:
    """Searches all stop strings at once, each character once (Knuth, Morris and Pratt).

    The one that is complete first counts; of several complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self.tables = [
            borders(stop) for stop in self.stops
        ]  # built once for all outputs of a request
        self.matched = [0] * len(self.stops)

    def add(self, text: str, seen: int, blind: bool) -> StopMatch | None:
        """Search text[seen:]. `blind`: matches that end here do not count."""
        for at in range(seen, len(text)):
            char, hit = text[at], None
            for which, (stop, table) in enumerate(zip(self.stops, self.tables, strict=True)):
                length = self.matched[which]
                while length and stop[length] != char:
                    length = table[length - 1]
                if stop[length] == char:
                    length += 1
                if length == len(stop):
                    if hit is None and not blind:
                        hit = StopMatch(stop, at + 1 - length, at + 1)
                    length = table[length - 1]
                self.matched[which] = length
            if hit is not None:
                return hit
        return None

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self.matched, default=0)


@lru_cache(maxsize=MOST_TABLES)
def borders(word: str) -> tuple[int, ...]:
    """For each prefix of `word`, the longest shorter one that it ends with."""
    table = [0] * len(word)
    length = 0
    for at in range(1, len(word)):
        while length and word[at] != word[length]:
            length = table[length - 1]
        if word[at] == word[length]:
            length += 1
        table[at] = length
    return tuple(table)


class Detokenizer:
    """The text of one output as it grows.

    `text` is what may be shown, `shown` how much of it has been taken. `stopped_by` is the stop string that
    ended it; tokens after that are not to be added.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self.pieces: TokenPieces
        if tokenizer.is_byte_level:
            self.pieces = BytePieces(tokenizer, context, skip_special_tokens)
        else:
            self.pieces = WindowPieces(
                tokenizer, context, skip_special_tokens, spaces_between_special_tokens
            )
        self.stops = StopStrings(stop) if stop else None
        self.include_stop, self.min_tokens = include_stop, min_tokens
        self.num_tokens = 0
        self.text = ""
        self.shown = 0
        self.stopped_by: str | None = None

    def add(self, token_id: int) -> bool:
        """One more token. True: the text has now ended by a stop string."""
        self.num_tokens += 1
        piece = self.pieces.add(token_id)
        return bool(piece) and self._extend(piece)

    def _extend(self, piece: str) -> bool:
        seen = len(self.text)
        self.text += piece
        if self.stops is None:
            return False
        found = self.stops.add(self.text, seen, blind=self.num_tokens <= self.min_tokens)
        if found is None:
            return False
        self.stopped_by = found.text
        self.text = self.text[: found.end if self.include_stop else found.start]
        return True

    def end(self) -> bool:
        """No more tokens will come. True: what was waiting completed a stop string."""
        if self.stopped_by is not None:
            return False
        piece = self.pieces.end()
        return bool(piece) and self._extend(piece)

    def take(self, ended: bool) -> str:
        """Text that may be shown and was not taken before; all of it when `ended`."""
        stop = len(self.text)
        if not ended and self.stops is not None and not self.include_stop:
            stop = max(stop - self.stops.held, self.shown)
        new, self.shown = self.text[self.shown : stop], stop
        return new

    @property
    def settled(self) -> str:
        """What `take` has given so far."""
        return self.text[: self.shown]
