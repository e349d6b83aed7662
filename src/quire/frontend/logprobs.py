"""Log-probabilities as users read them: for each position, token id -> Logprob.

Knows the wire's `Logprobs` and a tokenizer. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from quire.frontend.tokenizer import Tokenizer
from quire.protocol.output import Logprobs


@dataclass(slots=True)
class Logprob:
    """`rank` counts from 1 (the likeliest); None when it was not computed."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Position = dict[int, Logprob]


@dataclass(slots=True)
class FlatLogprobs(Sequence[Position | None]):
    """The same as a list of dicts, in five flat lists: fewer objects for a long output.

    Position p is entries start_indices[p] to end_indices[p]. An empty one is None.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: Position | None) -> None:
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Position | None]) -> None:
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Position | None: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> Position | FlatLogprobs | None:
        if isinstance(index, slice):
            part = FlatLogprobs()
            part.extend(self._position(i) for i in range(*index.indices(len(self))))
            return part
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._position(index % len(self))

    def _position(self, index: int) -> Position | None:
        span = range(self.start_indices[index], self.end_indices[index])
        if not span:
            return None
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in span
        }

    def __iter__(self) -> Iterator[Position | None]:
        return (self._position(index) for index in range(len(self)))


Positions = list[Position | None] | FlatLogprobs


def positions(
    found: Logprobs, tokenizer: Tokenizer | None, ranked: bool = True
) -> Iterator[Position]:
    """Each position of the wire's form; `ranked`: the entries after the chosen one are the likeliest, in order."""
    for ids, values, rank in zip(found.token_ids, found.values, found.ranks, strict=True):
        entries: Position = {}
        for place, (token_id, value) in enumerate(zip(ids, values, strict=True)):
            if token_id not in entries:
                order = rank if place == 0 else (place if ranked else None)
                text = None if tokenizer is None else tokenizer.piece(token_id)
                entries[token_id] = Logprob(value, order, text)
        yield entries


class PromptLogprobs:
    """A prompt's positions as they arrive, in parts and perhaps more than once (after a preemption)."""

    def __init__(self, num_prompt: int, tokenizer: Tokenizer | None):
        self.tokenizer, self.num_prompt = tokenizer, num_prompt
        self.entries: list[Position | None] = [None] * num_prompt
        self.missing = set(range(1, num_prompt))

    def add(self, found: Logprobs) -> None:
        for position, entries in enumerate(positions(found, self.tokenizer), found.start):
            if position in self.missing:
                self.entries[position] = entries
                self.missing.discard(position)

    def result(self, flat: bool) -> Positions:
        """One entry a prompt token; the first is None, for nothing stands before it."""
        if not flat:
            return self.entries
        container = FlatLogprobs()
        container.extend(self.entries)
        return container
