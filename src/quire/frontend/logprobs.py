"""Log-probabilities in the user's form: for each position, token id -> Logprob.

Knows the engine protocol's `Logprobs` and a tokenizer. Does not know requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from quire.frontend.tokenizer import Tokenizer
from quire.protocol.output import Logprobs


@dataclass(slots=True)
class Logprob:
    """`rank` counts from 1 (the most likely token); None if it was not computed."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Position = dict[int, Logprob]


@dataclass(slots=True)
class FlatLogprobs(Sequence[Position | None]):
    """A list of dicts, stored in flat lists: fewer objects for a long output.

    Position p has the entries start_indices[p] to end_indices[p]. An empty position is None.
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


def positions(
    found: Logprobs, tokenizer: Tokenizer | None, ranked: bool = True
) -> Iterator[Position]:
    """Convert from the engine protocol; `ranked`: after the sampled token follow the most likely ones, in order."""
    for ids, values, rank in zip(found.token_ids, found.values, found.ranks, strict=True):
        entries: Position = {}
        for place, (token_id, value) in enumerate(zip(ids, values, strict=True)):
            if token_id not in entries:
                order = rank if place == 0 else (place if ranked else None)
                text = None if tokenizer is None else tokenizer.piece(token_id)
                entries[token_id] = Logprob(value, order, text)
        yield entries


class PackedLogprobs(Sequence[Position | None]):
    """Positions of an output in arrays: 12 bytes per entry instead of about 200 in a dict of `Logprob`.

    Builds a position when it is read.
    """

    def __init__(self, tokenizer: Tokenizer | None, ranked: bool = True):
        self.tokenizer, self.ranked = tokenizer, ranked
        self.ids, self.values = array("i"), array("d")
        self.ends, self.ranks = array("q", [0]), array("q")

    def add(self, found: Logprobs, rows: Iterable[int]) -> None:
        """Append the positions `rows` of `found`."""
        for row in rows:
            self.ids.extend(found.token_ids[row])
            self.values.extend(found.values[row])
            self.ends.append(len(self.ids))
            self.ranks.append(found.ranks[row])

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def entries(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> list[Position | None]: ...
    def __getitem__(self, index: int | slice) -> Position | list[Position | None]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start, end = self.ends[index], self.ends[index + 1]
        position = Logprobs(0, [self.ids[start:end].tolist()], [self.values[start:end].tolist()], [self.ranks[index]])  # fmt: skip
        return next(positions(position, self.tokenizer, self.ranked))


class PackedPrompt(Sequence[Position | None]):
    """A prompt's positions: row numbers in `packed`; -1 means none, as for the first token."""

    def __init__(self, packed: PackedLogprobs, rows: Sequence[int]):
        self.packed, self.rows = packed, rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def entries(self) -> int:
        return self.packed.entries

    @overload
    def __getitem__(self, index: int) -> Position | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Position | None]: ...
    def __getitem__(self, index: int | slice) -> Position | list[Position | None] | None:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self.rows[index]
        return None if row < 0 else self.packed[row]


Positions = list[Position | None] | FlatLogprobs | PackedLogprobs | PackedPrompt


class PromptLogprobs:
    """Collects a prompt's positions, which arrive in parts and, after a preemption, more than once."""

    def __init__(self, num_prompt: int, tokenizer: Tokenizer | None):
        self.packed = PackedLogprobs(tokenizer)
        self.rows = array("q", [-1]) * num_prompt
        self._list: list[Position | None] = []

    def add(self, found: Logprobs) -> None:
        new: list[int] = []
        for row in range(len(found.ranks)):
            position = found.start + row
            if 0 < position < len(self.rows) and self.rows[position] < 0:
                self.rows[position] = len(self.packed) + len(new)
                new.append(row)
        self.packed.add(found, new)

    def result(self, flat: bool, packed: bool = False) -> Positions:
        """One entry per prompt token; the first is None, because no token precedes it."""
        found = PackedPrompt(self.packed, self.rows)
        if packed:
            return found
        if not flat:
            if sum(one is not None for one in self._list) != len(self.packed):
                self._list = list(found)
            return self._list
        container = FlatLogprobs()
        container.extend(found)
        return container
