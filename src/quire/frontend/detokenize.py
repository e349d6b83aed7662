"""Incremental detokenizer: emits no incomplete character, and no text that may be the start of a stop string.

    token ids -> pieces of text (`TokenPieces`) -> text to emit (withheld while `StopStrings` may match it)

The result does not depend on how the tokens are split into deltas. Knows a tokenizer and stop strings. Does not know
requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from quire.frontend.tokenizer import Tokenizer
from quire.models.bytes_in_tokens import byte_token

CONTEXT = 6  # prompt tokens decoded before the first output tokens
MOST_TABLES = 128  # cached failure tables of stop strings
MOST_HELD = 8  # tokens that may wait for the rest of a character (of at most four bytes)
UNKNOWN = "\ufffd"


class TokenPieces(Protocol):
    def add(self, token_id: int) -> str:
        """Add a token; returns the text that it completes."""

    def end(self) -> str:
        """The withheld text, as far as it is complete characters."""


class BytePieces:
    """For byte-level vocabularies: exact; one table lookup for a token of complete characters."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special: bool):
        self.tokenizer = tokenizer
        self.skip = tokenizer.special_ids if skip_special else frozenset()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.cut = False
        """The bytes so far end inside a character."""
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
        return ""  # the rest is an incomplete character


class WindowPieces:
    """For any other vocabulary: decodes a short window twice, without and with the new tokens.

        ids     ... a b c | d e
                    ^ start ^ read        the text of d e is decode(a b c d e) minus decode(a b c)

    Decoders depend on neighboring tokens (they strip a first space, they join bytes); the window provides some.
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
            start -= 1  # do not start inside a character
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
        num_held = len(self.ids) - self.read
        if len(text) <= len(self.known) or (text.endswith(UNKNOWN) and num_held < MOST_HELD):
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        new = text[len(self.known) :]
        unread, before = self.ids[self.read :], self.ids[: self.read]
        added = self.tokenizer.is_added
        if self.suppress_spaces and before and added(before[-1]) and added(unread[0]):
            new = new.removeprefix(" ")
        # Keep the last two advances, so that the next token has neighbors. This cut is between characters.
        self.ids = before[self.last :] + unread
        self.last, self.read = len(self.ids) - len(unread), len(self.ids)
        self.known = self._decode(self.ids)
        return new

    def end(self) -> str:
        unread = self.ids[self.read :]
        if not unread:
            return ""
        text = self._decode(self.ids)
        if self._byte(unread[-1]) is not None:
            text = text.rstrip(UNKNOWN)  # an incomplete character
        return text[len(self.known) :]


@dataclass(slots=True)
class StopMatch:
    """A stop string found at text[start:end]."""

    text: str
    start: int
    end: int


class StopStrings:
    """Searches all stop strings in one pass over the text (Knuth-Morris-Pratt).

    The first complete match wins; of several that end at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        # built once for all outputs of a request
        self.tables = [borders(stop) for stop in self.stops]
        self.matched = [0] * len(self.stops)

    def add(self, text: str, seen: int, blind: bool) -> StopMatch | None:
        """Search text[seen:]. `blind`: ignore matches that end in it."""
        for index in range(seen, len(text)):
            char, hit = text[index], None
            for number, (stop, table) in enumerate(zip(self.stops, self.tables, strict=True)):
                length = self.matched[number]
                while length and stop[length] != char:
                    length = table[length - 1]
                if stop[length] == char:
                    length += 1
                if length == len(stop):
                    if hit is None and not blind:
                        hit = StopMatch(stop, index + 1 - length, index + 1)
                    length = table[length - 1]
                self.matched[number] = length
            if hit is not None:
                return hit
        return None

    @property
    def num_withheld(self) -> int:
        """Number of characters at the end of the text that may be the start of a stop string."""
        return max(self.matched, default=0)


@lru_cache(maxsize=MOST_TABLES)
def borders(word: str) -> tuple[int, ...]:
    """The KMP failure table: for each prefix of `word`, the length of its longest proper prefix that is a suffix."""
    table = [0] * len(word)
    length = 0
    for index in range(1, len(word)):
        while length and word[index] != word[length]:
            length = table[length - 1]
        if word[index] == word[length]:
            length += 1
        table[index] = length
    return tuple(table)


class Detokenizer:
    """The text of one output.

    `text` is the text so far, `shown` the number of characters taken. `stopped_by` is the stop string that ended it;
    add no tokens after that.
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
        """Add a token. True: it completed a stop string."""
        self.num_tokens += 1
        piece = self.pieces.add(token_id)
        return bool(piece) and self._extend(piece)

    def _extend(self, piece: str) -> bool:
        seen = len(self.text)
        self.text += piece
        if self.stops is None:
            return False
        stop = self.stops.add(self.text, seen, blind=self.num_tokens <= self.min_tokens)
        if stop is None:
            return False
        self.stopped_by = stop.text
        self.text = self.text[: stop.end if self.include_stop else stop.start]
        return True

    def end(self) -> bool:
        """Finish: no more tokens follow. True: the withheld text completed a stop string."""
        if self.stopped_by is not None:
            return False
        piece = self.pieces.end()
        return bool(piece) and self._extend(piece)

    def take(self, finished: bool) -> str:
        """The text not taken before, without what may be the start of a stop string; all of it when `finished`."""
        stop = len(self.text)
        if not finished and self.stops is not None and not self.include_stop:
            stop = max(stop - self.stops.num_withheld, self.shown)
        new, self.shown = self.text[self.shown : stop], stop
        return new

    @property
    def settled(self) -> str:
        """The text that `take` has returned so far."""
        return self.text[: self.shown]
