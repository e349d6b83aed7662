"""Gate: how a feature holds a request back, without the scheduler knowing its name.

A gate has two ways to say no. `ready(request) == False` means "skip me": others may pass. `allow(...)
== 0` for a waiting request means "stop here": nobody behind it is admitted in this step, so that a
resource everyone queues for cannot be taken again and again by those behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.protocol.plan import StepPlan
    from quire.scheduler.request import Request


class Gate:
    """The base says yes to everything; a feature overrides what it needs. No torch here."""

    name = "gate"

    def ready(self, request: Request) -> bool:
        """May this waiting request be considered? False: skip it, look further. It may begin what the request needs."""
        return True

    def holds(self, request: Request) -> bool:
        """Does this gate hold the waiting request back? Statistics ask, so it changes nothing.

        Override it where `ready` has an effect.
        """
        return not self.ready(request)

    def allow(self, request: Request, num_tokens: int) -> int:
        """How many of these tokens may run in this step. 0: not now, and nobody behind it either."""
        return num_tokens

    def enter(self, request: Request) -> None:
        """It took a row."""

    def leave(self, request: Request) -> None:
        """It gave its row back: finished, aborted or preempted."""

    def gave_up(self, request: Request) -> None:
        """It ended while it waited."""

    def extra(self, plan: StepPlan) -> bytes | None:
        """What rides down in plan.extras[name]."""
        return None

    def learn(self, extra: bytes) -> None:
        """What the hook of the same name sent up."""
