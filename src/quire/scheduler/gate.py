"""Gate: how a feature blocks a request, without the scheduler knowing the feature's name.

A gate can block in two ways. `ready(request) == False`: the scheduler skips this request and considers later ones.
`allow(...) == 0` for a waiting request: the scheduler admits no later request in this step either, so that later
requests cannot keep taking a resource that several requests wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.protocol.plan import StepPlan
    from quire.scheduler.request import Request


class Gate:
    """Base class: it blocks nothing. A feature overrides the methods that it needs. No torch here."""

    name = "gate"

    def ready(self, request: Request) -> bool:
        """May the scheduler consider this waiting request? False: skip it. May start work that the request needs."""
        return True

    def holds(self, request: Request) -> bool:
        """Does this gate block the waiting request? For statistics, so it must change nothing.

        Override it if `ready` has a side effect.
        """
        return not self.ready(request)

    def allow(self, request: Request, num_tokens: int) -> int:
        """How many of these tokens may run in this step. 0: none; later waiting requests are not admitted either."""
        return num_tokens

    def enter(self, request: Request) -> None:
        """The request got a row."""

    def leave(self, request: Request) -> None:
        """The request lost its row: finished, aborted or preempted."""

    def gave_up(self, request: Request) -> None:
        """The request ended while it waited."""

    def extra(self, plan: StepPlan) -> bytes | None:
        """Data for the worker's hook of the same name, as plan.extras[name]."""
        return None

    def learn(self, extra: bytes) -> None:
        """Data from the worker's hook of the same name."""
