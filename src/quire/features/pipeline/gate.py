"""PipelineGate: deals work out over the plans in flight, so that each stage of a pipeline has a plan to compute.

A request has one token in flight at a time. If one plan took the rows of all requests, the next plan would have none, and
every stage but one would wait. So a plan takes its share of the rows that decode, and of each prompt.

Knows requests and the number of plans. Does not know stages, or how long a plan takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.scheduler.gate import Gate
from quire.scheduler.request import NO_ROW, Request

MIN_CHUNK = 128
"""Tokens of a prompt's part, at least: a step with fewer takes hardly less time, for it reads the weights."""


class PipelineGate(Gate):
    """See above.

    Args:
        plans: how many are in flight at once.
        chunked: whether prompts may be computed in parts.
    """

    name = "pipeline"
    order = 50

    def __init__(self, plans: int, chunked: bool = True, min_chunk: int = MIN_CHUNK):
        self.plans, self.chunked, self.min_chunk = plans, chunked, min_chunk
        self.rows_left = 0  # of the rows that decode, in the plan under construction
        self.chunk_of: dict[Request, int] = {}

    def begin(self, running: Sequence[Request]) -> None:
        decoding = sum(_is_decoding(request, request.num_computed_tokens) for request in running)
        self.rows_left = self._share(decoding)

    def allow(self, request: Request, start: int, num_tokens: int) -> int:
        if request.row != NO_ROW and _is_decoding(request, start):
            self.rows_left -= 1
            return num_tokens if self.rows_left >= 0 else 0
        if not self.chunked:
            return num_tokens
        chunk = self.chunk_of.get(request, 0) if request.row != NO_ROW else 0
        if not chunk:
            chunk = max(self._share(request.length - start), self.min_chunk)
            self.chunk_of[request] = chunk
        return min(num_tokens, chunk)

    def leave(self, request: Request) -> None:
        self.chunk_of.pop(request, None)

    def on_waiting_ended(self, request: Request) -> None:
        self.chunk_of.pop(request, None)

    def _share(self, total: int) -> int:
        return -(-total // self.plans)


def _is_decoding(request: Request, num_computed_tokens: int) -> bool:
    return request.length - num_computed_tokens <= 1
