"""Log-probabilities in the shapes of the two endpoints.

Knows dicts {id: object with logprob, rank, decoded_token}, the chosen token first. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.server.engine import LogprobLike

FLOOR = -9999.0  # JSON has no -inf
Position = Mapping[int, LogprobLike] | None
Name = Callable[[int, LogprobLike], str]


def floored(value: float) -> float:
    return max(value, FLOOR)


def naming(as_ids: bool, token_text: Callable[[int], str]) -> Name:
    """How a token is written: `token_id:N` when asked to, so that none is unprintable."""

    def name(token: int, entry: LogprobLike) -> str:
        if as_ids:
            return f"token_id:{token}"
        return token_text(token) if entry.decoded_token is None else entry.decoded_token

    return name


def chosen(position: Mapping[int, LogprobLike], token: int) -> LogprobLike:
    return position[token] if token in position else next(iter(position.values()))


def ranked(
    position: Mapping[int, LogprobLike], top: int, token: int, keep_chosen: bool
) -> list[int]:
    """The `top` best ids (-1: all), best first; with `keep_chosen` the chosen one too, wherever it ranks."""
    order = sorted(position, key=lambda one: position[one].logprob, reverse=True)
    best = order if top < 0 else order[:top]
    return [*best, token] if keep_chosen and token not in best else best


def chat(
    tokens: Iterable[int], positions: Sequence[Position], top: int, name: Name
) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}]}"""
    content = []
    for token, position in zip(tokens, positions, strict=False):
        if position is None:
            continue
        entry = written(token, chosen(position, token), name)
        best = ranked(position, top, token, keep_chosen=False)
        entry["top_logprobs"] = [written(one, position[one], name) for one in best]
        content.append(entry)
    return {"content": content}


def written(token: int, entry: LogprobLike, name: Name) -> dict[str, Any]:
    text = name(token, entry)
    return {
        "token": text,
        "logprob": floored(entry.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def legacy(
    tokens: Iterable[int], positions: Sequence[Position], top: int, name: Name, offset: int
) -> tuple[dict[str, Any], int]:
    """{tokens, token_logprobs, text_offset, top_logprobs}, and the offset after the last token."""
    names: list[str] = []
    values: list[float | None] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    for token, position in zip(tokens, positions, strict=False):
        offsets.append(offset)
        if position is None:  # the first token of a prompt: nothing comes before it
            text, value, best = name(token, _Nothing()), None, None
        else:
            entry = chosen(position, token)
            text, value = name(token, entry), floored(entry.logprob)
            keep = ranked(position, top, token, keep_chosen=True)
            best = {name(one, position[one]): floored(position[one].logprob) for one in keep}
        names.append(text)
        values.append(value)
        tops.append(best)
        offset += len(text)
    shape = {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": names,
        "top_logprobs": tops,
    }
    return shape, offset


@dataclass(slots=True)
class _Nothing:
    logprob: float = FLOOR
    rank: int | None = None
    decoded_token: str | None = None


def prompt(positions: Sequence[Position] | None) -> list[dict[str, Any] | None] | None:
    """[null, {"id": {logprob, rank, decoded_token}}, ...]"""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": floored(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in positions
    ]
