"""Quarantine: which requests ran when the engine died, identified by prompt and parameters.

A request that ran at two deaths, and did not finish between them, is poison: it is refused for FORGET_S. If one was on trial
at the second death (`features/resumed_requests`), it alone ran in this sense; those that have passed their trial did not run at
the first. Knows digests and a clock. Does not know how a death is detected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from quire.protocol.plan import EnteredRow
from quire.protocol.request import EngineRequest, MediaItem, RequestParams
from quire.protocol.sampling_params import SamplingParams

POISON = (
    "the engine died twice while this request ran, so the server does not run it again now; change the prompt or the"
    " parameters"
)
DEATHS = 2  # one may be a coincidence
# how long a request is refused at most, because it may be innocent and only have run beside a poisonous one
FORGET_S = 3600.0
MAX_DIGESTS = 1024  # digests that are kept, so that the published list fits on the state board
MOST_FIELD = 1 << 10  # larger fields are replaced by a digest in a short form
MOST_PARAMS = 1 << 16  # larger parameters get a short form


class Suspects:
    """Counts deaths by digest. Several threads may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        # (count, time of the last one); oldest first
        self._deaths: dict[str, tuple[int, float]] = {}

    def ran(self, digests: Iterable[str]) -> None:
        """The engine died while the requests with these digests ran."""
        with self._lock:
            now = self._clock()
            for digest in set(digests):
                count, _ = self._deaths.pop(digest, (0, now))
                self._deaths[digest] = count + 1, now
            for digest, (_, last) in list(self._deaths.items()):
                if len(self._deaths) <= MAX_DIGESTS and now - last <= FORGET_S:
                    break
                del self._deaths[digest]

    def died(self, running: Sequence[EnteredRow], lengths: Mapping[str, int]) -> list[str]:
        """The engine died while these rows were in use; lengths: their tokens by id. Returns the ids of the requests that the
        death is blamed on: those on trial, else all."""
        for row in running:
            if 0 < row.trial_length <= lengths[row.id]:
                self.completed(digest_of_entered(row))
        on_trial = [row for row in running if lengths[row.id] < row.trial_length]
        self.ran(digest_of_entered(row) for row in on_trial or running)
        return [row.id for row in on_trial or running]

    def completed(self, digest: str) -> bool:
        """A request finished, so its deaths are forgotten. Returns whether it had any."""
        with self._lock:
            return self._deaths.pop(digest, None) is not None

    def poison(self) -> list[str]:
        """Digests of the requests that ran at DEATHS deaths."""
        now = self._clock()
        with self._lock:
            return [
                digest
                for digest, (count, last) in self._deaths.items()
                if count >= DEATHS and now - last <= FORGET_S
            ]

    def __bool__(self) -> bool:
        return bool(self._deaths)


def digest_of(request: EngineRequest) -> str:
    """Equal for requests with the same prompt and parameters, whatever their ids and seeds."""
    tokens = request.tokens[: request.prompt_length]
    return digest(tokens, request.params, request.adapter, request.extras, request.media)


def digest_of_entered(entered: EnteredRow) -> str:
    """The digest of the request that had this row."""
    tokens = entered.tokens[: entered.num_prompt]
    return digest(tokens, entered.params, entered.adapter, entered.extras, entered.media)


def digest(
    tokens: Sequence[int],
    params: RequestParams,
    adapter: str | None,
    extras: dict[str, bytes],
    media: Sequence[MediaItem] = (),
) -> str:
    hashes = [item.hash for item in media]
    # Each of n outputs has its own seed, and only the first computes the prompt's log-probabilities.
    if isinstance(params, SamplingParams):
        params = params.settled(seed=None, prompt_logprobs=None, checked=True)
    try:
        data = msgspec.msgpack.encode([tokens, short_form(params), adapter, extras, hashes])
    # it cannot have been sent to the engine
    except (TypeError, ValueError, OverflowError, RecursionError):
        data = repr((tokens, adapter, extras, hashes)).encode()
    return sha256(data).hexdigest()[:32]


def short_form(params: RequestParams) -> RequestParams:
    """Parameters of more than MOST_PARAMS bytes with large fields replaced by digests; smaller ones unchanged."""
    if len(msgspec.msgpack.encode(params)) <= MOST_PARAMS:
        return params
    plain, left_out = type(params)(), dict[str, str]()
    for field in msgspec.structs.fields(params):
        data = msgspec.msgpack.encode(getattr(params, field.name))
        if len(data) > MOST_FIELD:
            left_out[field.name] = sha256(data).hexdigest()
    values: dict[str, Any] = {name: getattr(plain, name) for name in left_out}
    if isinstance(params, SamplingParams):
        return params.settled(**values, extra_args={"left_out": left_out}, checked=True)
    values["extra_kwargs"] = {"left_out": left_out}
    return msgspec.structs.replace(params, **values)
