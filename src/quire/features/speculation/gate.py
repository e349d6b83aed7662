"""SpeculationGate: plans exactly the draft tokens that the worker has, and counts the accepted ones.

Knows requests and counts. Does not know drafters, or the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from quire.protocol.output import EngineOutput
from quire.protocol.plan import StepPlan
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

NAME = "speculation"
DRAFTS = "spec_decode_num_drafts"
DRAFT_TOKENS = "spec_decode_num_draft_tokens"
ACCEPTED = "spec_decode_num_accepted_tokens"
PER_POSITION = ACCEPTED + "_per_pos:{}"


class DraftReport(Struct, array_like=True):
    """What the hook did in a step."""

    # by row that drew: the draft tokens that it has now; a row may be missing if it had none before, and has none
    num_drafts: dict[int, int]
    # for each row that had draft tokens: how many were verified, and accepted
    verified: list[tuple[int, int]]
    ids: list[str] = []  # of their requests, if answers report them


class SpeculationGate(Gate):
    """Without it the scheduler would take blocks and budget for `num_speculative_tokens` more tokens of every row.

    Args:
        shares_texts: the drafter may use the text of a request for others (`SpeculativeOptions`).
        counts: where it counts, under the names of `counters`; None: in a dict of its own.
    """

    name = NAME
    order = 30

    def __init__(
        self,
        num_speculative_tokens: int,
        shares_texts: bool = True,
        counts: dict[str, float] | None = None,
    ):
        self.num_speculative_tokens, self.shares_texts = num_speculative_tokens, shares_texts
        self._per_position = [PER_POSITION.format(index) for index in range(num_speculative_tokens)]
        self.counters = [DRAFTS, DRAFT_TOKENS, ACCEPTED, *self._per_position]
        self.counts = dict.fromkeys(self.counters, 0.0) if counts is None else counts
        self._verified: dict[str, tuple[int, int]] = {}  # by request, of the last step
        self._num_drafts: dict[int, int] = {}  # by row
        self._scopes: dict[int, bytes] = {}  # by row, of requests that enter with the next plan

    def begin(self, running: Sequence[Request]) -> None:
        """All draft tokens that the rows have; with a step in flight, as many as they may have."""
        count_of = self._num_drafts.get
        for request in running:
            if request.num_drafts and not request.num_pending_tokens:
                request.num_drafts = count_of(request.row, 0)

    def enter(self, request: Request) -> None:
        """`root` is a hash of salt and adapter."""
        if self.shares_texts:
            self._scopes[request.row] = request.root + request.tenant.encode()

    def data_for_hook(self, plan: StepPlan) -> bytes | None:
        """The scopes of the rows that enter: a drafter may use the text of one for another only if they are equal."""
        if not self._scopes:
            return None
        scopes, self._scopes = self._scopes, {}
        return msgspec.msgpack.encode(scopes)

    def data_from_hook(self, extra: bytes) -> None:
        report = msgspec.msgpack.decode(extra, type=DraftReport)
        self._num_drafts.update(report.num_drafts)
        self._verified = dict(zip(report.ids, report.verified, strict=False))
        for verified, accepted in report.verified:
            self.counts[DRAFTS] += 1
            self.counts[DRAFT_TOKENS] += verified
            self.counts[ACCEPTED] += accepted
            for index in range(accepted):
                self.counts[self._per_position[index]] += 1

    def add_output_details(self, outputs: list[EngineOutput]) -> None:
        """What was verified in this step, and num_speculative_tokens."""
        if not self._verified:
            return
        verified, self._verified = self._verified, {}
        for output in outputs:
            if (found := verified.get(output.id)) is not None:
                output.details[NAME] = [*found, self.num_speculative_tokens]
