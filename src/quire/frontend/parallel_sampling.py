"""Parallel sampling: one request with n outputs -> n engine requests, and the ranking of their results.

Knows seeds, ids and ranking. Does not know text.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

MASK64 = (1 << 64) - 1


def derive_seed(*numbers: int) -> int:
    """Hash integers to 63 bits, the same on every machine (SplitMix64's finalizer)."""
    state = 0
    for number in numbers:
        state = (state + (number & MASK64) + 0x9E3779B97F4A7C15) & MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
        state ^= state >> 31
    return state >> 1


def num_children(params: SamplingParams) -> int:
    return max(params.n, params.best_of or 1)


def child_id(request_id: str, index: int, count: int) -> str:
    return request_id if count == 1 else f"{request_id}_{index}"


def fan_out(request: EngineRequest) -> list[EngineRequest]:
    """Make n (or best_of) requests of one output each from a request with settled params.

    The first uses the request's own seed, so its output equals the output with n=1. Only the first computes the prompt's
    log-probabilities.
    """
    params = request.params
    if not isinstance(params, SamplingParams):
        return [request]
    if (count := num_children(params)) == 1:
        return [request]
    logprobs = params.logprobs
    if count > params.n and logprobs is None and params.logprob_token_ids is None:
        logprobs = 0  # ranking needs the sampled tokens' logprobs (logprob_token_ids has them)
    seed = params.seed or 0
    children = []
    for index in range(count):
        child_params = params.settled(
            n=1, best_of=None, logprobs=logprobs, checked=True,
            seed=seed if index == 0 else derive_seed(seed, index),
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        )  # fmt: skip
        children.append(
            msgspec.structs.replace(
                request, id=child_id(request.id, index, count), params=child_params
            )
        )
    return children


def top_n(scores: Sequence[float], n: int) -> list[int]:
    """Indices of the n highest scores, best first; ties keep their order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:n]
