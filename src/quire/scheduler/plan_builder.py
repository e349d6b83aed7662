"""PlanBuilder: one plan under construction, and how many output tokens it may add to each request.

Knows work items and how to undo one. Does not know blocks, or which requests should run.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
from quire.scheduler.request import Request

Counted = tuple[Request, int]  # a request, and how many outputs (tokens) this step may add to it


CANCELLED = -1  # the count of an item whose tokens are ignored


def cancel_drafts(in_flight: Mapping[int, list[Counted]], request: Request) -> bool:
    """Ignore what the steps in flight draw for `request` if one of them verifies draft tokens. Return whether one does.

    The caller now knows tokens that these steps may draw. A draft token at the same position may be wrong. How many
    draft tokens are accepted is not known yet, so neither are the positions of the draws.
    """
    places = [
        (items, index, most)
        for items in in_flight.values()
        for index, (other, most) in enumerate(items)
        if other is request
    ]
    if not any(most > 1 for _, _, most in places):
        return False
    for items, index, _ in places:
        items[index] = request, CANCELLED
    request.pending = 0
    return True


def cancel_redundant_draws(
    in_flight: Mapping[int, list[Counted]], request: Request, count: int
) -> None:
    """Do not count the next `count` draws in flight of `request`: their tokens are known. No step verifies drafts."""
    for items in in_flight.values():
        for index, (other, most) in enumerate(items):
            if other is request and most > 0 and count:
                items[index] = request, 0
                request.pending -= 1
                count -= 1


class PlanBuilder:
    """Adds work while `budget` tokens last. The work of a preempted request is undone."""

    __slots__ = ("budget", "counted", "entered", "preempted", "work")

    def __init__(self, budget: int):
        self.budget = budget
        self.preempted = False
        self.work: list[WorkItem] = []
        self.entered: list[EnteredRow] = []
        self.counted: list[Counted] = []

    def take(self, request: Request, num_tokens: int, added: list[list[int]], drafts: bool) -> None:
        """Give `request` num_tokens of this step. Tokens beyond its length are draft tokens to verify."""
        length = len(request.tokens) + request.pending
        request.computed = computed = request.computed + num_tokens
        if computed < length:
            request.drafted = False
            self.work.append(WorkItem(request.row, num_tokens, added, 0, False))
            self.counted.append((request, 0))
        else:
            num_drafts = computed - length
            request.pending += 1 + num_drafts
            request.drafted = drafts and request.generates
            self.work.append(
                WorkItem(request.row, num_tokens, added, num_drafts, request.generates)
            )
            self.counted.append((request, 1 + num_drafts))
        self.budget -= num_tokens

    def undo(self, request: Request) -> None:
        """Remove this plan's work for `request`, if there is any. The caller resets the request's `computed`."""
        for index, (other, counted) in enumerate(self.counted):
            if other is request:
                self.budget += self.work[index].num_tokens
                request.pending -= counted
                del self.work[index], self.counted[index]
                return

    def finish(self, step: int, left: list[int]) -> StepPlan:
        return StepPlan(step, self.entered, self.work, left)
