"""TokenIndex: where each n-gram of a text occurs, in O(1) for each token.

Knows tokens and places. Does not know rows, or what a place is used for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_INDEXED = 4096
"""Tokens of a row that one call adds to its index: a long prompt takes several steps."""
MAX_PLACES = 8
"""Earlier occurrences that are compared."""
MAX_DIFFERENT = 2
"""Tokens in a row that differ from those before a place, as the values of two records do, and the text goes on there."""
END = -1
_START = -1


class TokenIndex:
    """Texts one after another, each followed by END, and the places that follow each n-gram.

    Places count from the first token that was ever added; places before `start` are dropped.

    Args:
        size: tokens of an n-gram, at least 2. Of single tokens only the last place is known (`place_after_token`).
    """

    __slots__ = ("_after", "_earlier", "_gram", "_last", "_mask", "_token", "size", "start", "tokens")  # fmt: skip

    def __init__(self, size: int = 2) -> None:
        self.start, self.size = 0, size
        self.tokens = array("i")
        self._earlier = array("q")  # by token: the place before it that follows the same n-gram
        self._last: dict[int, int] = {}  # by n-gram: the last place that follows it
        self._gram, self._mask = _START, (1 << 32 * (size - 1)) - 1  # the last n-gram of the text
        self._after: dict[int, int] = {}  # by token: the last place that follows it
        self._token = END  # the last of the text

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the last text."""
        last, gram, mask = self._last, self._gram, self._mask
        last_of, add, after, before = last.get, self._earlier.append, self._after, self._token
        for place, token in enumerate(tokens, self.start + len(self.tokens)):
            add(last_of(gram, -1))
            last[gram] = after[before] = place
            gram, before = (gram & mask) << 32 | token, token
        self._gram, self._token = gram, before
        self.tokens.extend(tokens)

    def add_text(self, tokens: Sequence[int]) -> None:
        self.extend(tokens)
        self.tokens.append(END)
        self._earlier.append(-1)
        self._gram, self._token = _START, END

    def drop_text(self, count: int) -> None:
        """Drop the first text, of `count` tokens."""
        gram, last, before, after = _START, self._last, END, self._after
        for place, token in enumerate(self.tokens[:count], self.start):
            if last.get(gram) == place:
                del last[gram]
            if after.get(before) == place:
                del after[before]
            gram, before = (gram & self._mask) << 32 | token, token
        del self.tokens[: count + 1], self._earlier[: count + 1]
        self.start += count + 1

    def places(self, recent: Sequence[int] | None = None, most: int = MAX_PLACES) -> list[int]:
        """The last `most` places that follow the last n-gram of these tokens (None: of the text), the last one first."""
        gram = self._gram
        if recent is not None:
            gram = _START
            for token in recent[-self.size :]:
                gram = (gram & self._mask) << 32 | token
        found: list[int] = []
        place, start, earlier = self._last.get(gram, -1), self.start, self._earlier
        while place >= start and len(found) < most:
            found.append(place)
            place = earlier[place - start]
        return found

    def place_after_token(self) -> int:
        """The last place that follows the text's last token; -1: it did not occur before."""
        return -1 if self._token == END else self._after.get(self._token, -1)

    def goes_on(self, place: int, recent: array[int]) -> bool:
        """Whether the tokens before `place` are the last of `recent`, but for the last one or two of these."""
        offset, end, size = place - self.start, len(recent), self.size
        if not size < offset < len(self.tokens):
            return False
        for differ in range(1, min(MAX_DIFFERENT, offset - size, end - size) + 1):
            before = self.tokens[offset - differ - size : offset - differ]
            if before == recent[end - differ - size : end - differ]:
                return True
        return False

    def after(self, place: int, limit: int) -> list[int]:
        """What follows a place, up to the end of its text. The last text goes on there: it repeats what follows."""
        offset = place - self.start
        found = self.tokens[offset : offset + limit].tolist()
        if END in found:
            return found[: found.index(END)]
        if found and len(found) < limit:
            found = (found * (limit // len(found) + 1))[:limit]
        return found

    def match(self, place: int, recent: array[int]) -> int:
        """How many tokens before `place` are also the last of `recent`; the last n-gram is."""
        offset, tokens = place - self.start, self.tokens
        most = min(len(recent), offset)
        if tokens[offset - most : offset] == recent[len(recent) - most :]:
            return most
        count = self.size
        while count < most and tokens[offset - 1 - count] == recent[-1 - count]:
            count += 1
        return count
