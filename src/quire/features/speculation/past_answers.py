"""PastAnswers: the tokens of past answers, in an index for each scope. Bounded in number and bytes; the oldest go first."""

from __future__ import annotations

from array import array
from collections import deque

from quire.features.speculation.token_index import TokenIndex

MAX_BYTES = 64 << 20
BYTES_PER_TOKEN = 192
"""Of an index: an entry of each array, and one of the dict, which takes most of it."""


class PastAnswers:
    """One for each worker. Answers of one scope are visible to requests of an equal scope only.

    Args:
        max_answers: answers that are kept (`suffix_decoding_max_cached_requests`); 0: none.
    """

    def __init__(self, max_answers: int):
        self.max_answers = max_answers
        self.num_bytes = 0
        self._by_scope: dict[bytes, TokenIndex] = {}
        self._ages: deque[tuple[bytes, int]] = deque()  # scope and length, the oldest first

    def of(self, scope: bytes) -> TokenIndex | None:
        return self._by_scope.get(scope)

    def add(self, scope: bytes, tokens: array[int]) -> None:
        tokens = tokens[: MAX_BYTES // BYTES_PER_TOKEN - 1]
        if self.max_answers == 0 or len(tokens) <= 2:
            return
        self._by_scope.setdefault(scope, TokenIndex()).add_text(tokens)
        self._ages.append((scope, len(tokens)))
        self.num_bytes += (len(tokens) + 1) * BYTES_PER_TOKEN
        while len(self._ages) > self.max_answers or self.num_bytes > MAX_BYTES:
            scope, count = self._ages.popleft()
            self._by_scope[scope].drop_text(count)
            self.num_bytes -= (count + 1) * BYTES_PER_TOKEN
            if not self._by_scope[scope].tokens:
                del self._by_scope[scope]
