"""Log-probabilities in the JSON shapes of the endpoints.

Knows dicts {id: object with logprob, rank, decoded_token}, the chosen token first. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from quire.frontend.logprobs import Logprob
from quire.server.streaming_json import LongList, listed

FLOOR = -9999.0  # JSON has no -inf
Position = Mapping[int, Logprob] | None
Name = Callable[[int, Logprob], str]
LEGACY = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


def floored(value: float) -> float:
    return max(value, FLOOR)


def chosen(position: Mapping[int, Logprob], token: int) -> Logprob:
    return position[token] if token in position else next(iter(position.values()))


def ranked(position: Mapping[int, Logprob], top: int, token: int, keep_chosen: bool) -> list[int]:
    """The ids of the `top` best tokens (-1: all), best first; `keep_chosen` adds the chosen one if it is not among
    them.
    """
    order = sorted(position, key=lambda one: position[one].logprob, reverse=True)
    best = order if top < 0 else order[:top]
    return [*best, token] if keep_chosen and token not in best else best


@dataclass(frozen=True, slots=True)
class Joined:
    """The positions of a prompt and its output, chained without a copy."""

    parts: tuple[Iterable[Position], ...]

    def __iter__(self) -> Iterator[Position]:
        return chain.from_iterable(self.parts)


def chat(
    tokens: Sequence[int], positions: Iterable[Position], top: int, name: Name, long: bool = False
) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}]}"""
    return {"content": listed(partial(chat_rows, tokens, positions, top, name), long)}


def chat_rows(
    tokens: Iterable[int], positions: Iterable[Position], top: int, name: Name
) -> Iterator[dict[str, Any]]:
    for token, position in zip(tokens, positions, strict=False):
        if position is None:
            continue
        entry = written(token, chosen(position, token), name)
        best = ranked(position, top, token, keep_chosen=False)
        entry["top_logprobs"] = [written(one, position[one], name) for one in best]
        yield entry


def written(token: int, entry: Logprob, name: Name) -> dict[str, Any]:
    text = name(token, entry)
    return {
        "token": text,
        "logprob": floored(entry.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def legacy(
    tokens: Sequence[int], positions: Iterable[Position], top: int, name: Name, offset: int
) -> tuple[dict[str, Any], int]:
    """{tokens, token_logprobs, text_offset, top_logprobs}, and the offset after the last token."""
    rows = list(legacy_rows(tokens, positions, top, name, offset))
    if rows:
        offset = rows[-1][0] + len(rows[-1][2])
    return dict(zip(LEGACY, map(list, zip(*rows, strict=True)) if rows else ([], [], [], []), strict=True)), offset  # fmt: skip


def long_legacy(
    tokens: Sequence[int], positions: Iterable[Position], top: int, name: Name
) -> dict[str, Any]:
    """The same for a long answer: each list is encoded while it is sent."""

    def column(index: int) -> Iterator[Any]:
        best = top if index == 3 else None
        return (row[index] for row in legacy_rows(tokens, positions, best, name, 0))

    return {field: LongList(partial(column, index)) for index, field in enumerate(LEGACY)}


def legacy_rows(
    tokens: Iterable[int], positions: Iterable[Position], top: int | None, name: Name, offset: int
) -> Iterator[tuple[int, float | None, str, dict[str, float] | None]]:
    """For each token, a value of each of LEGACY. `top` None: no top_logprobs."""
    for token, position in zip(tokens, positions, strict=False):
        if position is None:  # the first token of a prompt has no log-probability
            text, value, best = name(token, Logprob(FLOOR)), None, None
        else:
            entry = chosen(position, token)
            text, value, best = name(token, entry), floored(entry.logprob), None
            if top is not None:
                keep = ranked(position, top, token, keep_chosen=True)
                best = {name(one, position[one]): floored(position[one].logprob) for one in keep}
        yield offset, value, text, best
        offset += len(text)


def prompt(positions: Iterable[Position] | None, long: bool = False) -> Any:
    """[null, {"id": {logprob, rank, decoded_token}}, ...]"""
    return None if positions is None else listed(partial(map, prompt_row, positions), long)


def prompt_row(position: Position) -> dict[str, Any] | None:
    if position is None:
        return None
    return {
        str(token): {
            "logprob": floored(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in position.items()
    }
