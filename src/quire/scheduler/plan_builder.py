"""PlanBuilder: one plan under construction, and how many output tokens it may add to each request.

Knows work items and how to undo one. Does not know blocks, or which requests should run.
"""

from __future__ import annotations

from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
from quire.scheduler.request import Request

PendingOutputs = tuple[Request, int]
"""A request, and how many outputs (tokens) this step may add to it."""


class PlanBuilder:
    """Adds work while `budget` tokens last. The work of a preempted request is undone."""

    __slots__ = ("budget", "entered", "pending_outputs", "preempted", "work")

    def __init__(self, budget: int):
        self.budget = budget
        self.preempted = False
        self.work: list[WorkItem] = []
        self.entered: list[EnteredRow] = []
        self.pending_outputs: list[PendingOutputs] = []

    def add_work(
        self, request: Request, num_tokens: int, new_blocks: list[list[int]], drafts: int
    ) -> None:
        """Give `request` num_tokens of this step. Tokens beyond its length are draft tokens to verify; after them, the worker
        may have `drafts` more."""
        length = len(request.tokens) + request.num_pending_tokens
        request.num_computed_tokens = num_computed_tokens = request.num_computed_tokens + num_tokens
        if num_computed_tokens < length:
            request.num_drafts = 0
            self.work.append(WorkItem(request.row, num_tokens, new_blocks, 0, False))
            self.pending_outputs.append((request, 0))
        else:
            num_drafts = num_computed_tokens - length
            request.num_pending_tokens += 1 + num_drafts
            request.num_drafts = drafts if request.generates else 0
            self.work.append(
                WorkItem(request.row, num_tokens, new_blocks, num_drafts, request.generates)
            )
            self.pending_outputs.append((request, 1 + num_drafts))
        self.budget -= num_tokens

    def remove_work(self, request: Request) -> None:
        """Remove this plan's work for `request`, if there is any. The caller resets the request's `num_computed_tokens`."""
        for index, (other, num_pending) in enumerate(self.pending_outputs):
            if other is request:
                self.budget += self.work[index].num_tokens
                request.num_pending_tokens -= num_pending
                del self.work[index], self.pending_outputs[index]
                return

    def finish(self, step: int, freed_rows: list[int]) -> StepPlan:
        return StepPlan(step, self.entered, self.work, freed_rows)
