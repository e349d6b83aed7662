"""Repetition detector: finds an output that repeats a pattern of tokens, token by token.

Knows token ids. Does not know what happens to such an output.
"""

from __future__ import annotations

from quire.protocol.repetition import RepetitionDetectionParams


class RepetitionDetector:
    """The tokens of one output, and for each pattern length the current run of matches.

    A pattern of P tokens has occurred `min_count` times when the last P x (min_count - 1) tokens each equal the token
    P before them. So one count per P is enough, and a token costs one comparison per length.
    """

    def __init__(self, params: RepetitionDetectionParams, min_tokens: int = 0):
        self.lengths = range(max(1, params.min_pattern_size), params.max_pattern_size + 1)
        self.times, self.min_tokens = params.min_count, min_tokens
        self._tokens: list[int] = []
        self._repeated = [0] * len(self.lengths)

    def add(self, token: int) -> bool:
        """Add a token; True if the output must end with it."""
        tokens, repeated, is_repetitive = self._tokens, self._repeated, False
        count = len(tokens)
        for index, length in enumerate(self.lengths):
            if length > count:
                break
            repeated[index] = repeated[index] + 1 if tokens[count - length] == token else 0
            is_repetitive |= repeated[index] >= length * (self.times - 1)
        tokens.append(token)
        return is_repetitive and count + 1 >= self.min_tokens
