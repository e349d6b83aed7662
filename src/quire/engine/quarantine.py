"""Requests that were running when the engine died, by what they asked for.

One that ran at two deaths, and did not come to its end between them, is poison: no engine is given it again for FORGET_S. Knows
digests and a clock. Does not know how a death is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

import msgspec

from quire.protocol.plan import EnteredRow
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

DEATHS = 2  # one may be chance
FORGET_S = (
    3600.0  # an innocent request that ran beside a poisonous one is refused no longer than this
)
MOST = 1024  # digests that are kept: the published list stays below the board's room
MOST_FIELD = 1 << 10  # bytes of a field that a short form keeps
MOST_PARAMS = 1 << 16  # bytes of parameters that are their own short form


class Suspects:
    """Deaths by digest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._deaths: dict[str, tuple[int, float]] = {}  # count, when the last was; oldest first

    def ran(self, digests: Iterable[str]) -> None:
        """The engine died while these ran."""
        now = self._clock()
        for digest in set(digests):
            count, _ = self._deaths.pop(digest, (0, now))
            self._deaths[digest] = count + 1, now
        for digest, (_, when) in list(self._deaths.items()):
            if len(self._deaths) <= MOST and now - when <= FORGET_S:
                break
            del self._deaths[digest]

    def completed(self, digest: str) -> bool:
        """A request came to its end, so it is forgotten; whether it was suspect."""
        return self._deaths.pop(digest, None) is not None

    def poison(self) -> list[str]:
        """Digests of what ran at DEATHS deaths."""
        now = self._clock()
        return [
            digest
            for digest, (count, when) in self._deaths.items()
            if count >= DEATHS and now - when <= FORGET_S
        ]

    def __bool__(self) -> bool:
        return bool(self._deaths)


def digest_of(request: EngineRequest) -> str:
    """Equal for requests with the same prompt and parameters, whatever their ids and seeds."""
    return digest(request.tokens, request.params, request.adapter)


def digest_of_entered(entered: EnteredRow) -> str:
    """The digest of the request that had this row."""
    return digest(entered.tokens[: entered.num_prompt], entered.params, entered.adapter)


def digest(tokens: Sequence[int], params: SamplingParams, adapter: str | None) -> str:
    # Of n outputs each has its own seed, and the first alone computes the prompt's log-probabilities.
    asked = params.settled(seed=None, prompt_logprobs=None, checked=True)
    try:
        data = msgspec.msgpack.encode([tokens, short_form(asked), adapter])
    except (TypeError, ValueError, OverflowError, RecursionError):  # no engine was sent it
        data = repr((tokens, adapter)).encode()
    return sha256(data).hexdigest()[:32]


def short_form(params: SamplingParams) -> SamplingParams:
    """Parameters of more than MOST_PARAMS bytes with a digest in place of each large field; others as they are."""
    if len(msgspec.msgpack.encode(params)) <= MOST_PARAMS:
        return params
    left_out: dict[str, str] = {}
    for field in msgspec.structs.fields(SamplingParams):
        data = msgspec.msgpack.encode(getattr(params, field.name))
        if len(data) > MOST_FIELD:
            left_out[field.name] = sha256(data).hexdigest()
    plain = SamplingParams()
    defaults = {name: getattr(plain, name) for name in left_out}
    return params.settled(**defaults | {"extra_args": {"left_out": left_out}}, checked=True)
