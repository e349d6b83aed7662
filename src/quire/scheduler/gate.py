"""Gate: how a feature blocks a request, without the scheduler knowing the feature's name.

A gate can block in two ways. `ready(request) == False`: the scheduler skips this request and considers later ones.
`allow(...) == 0` for a waiting request: the scheduler admits no later request in this step either, so that later
requests cannot keep taking a resource that several requests wait for.

A request may own blocks without a row, at both ends, while a gate needs them (`held_blocks.py`). Before the row: the gate
loads keys and values that need not be computed (`can_load`, `load`, `loaded`). After it: the gate saves them, for example
(`release`); a preempted request is not admitted again meanwhile.

    waits ──can_load, load──> owns blocks ──loaded──> owns blocks, gets a row ──> lost its row ──release──> blocks are free

The scheduler asks its gates in ascending `order`, and stops at the first that blocks the request:

     0 ... 29   a waiting request gets what it needs: work of other threads may begin here
    30 ... 69   the tokens of a step are counted and divided among requests
    70 ... 99   a request's tokens of a step end at an exact place: a later gate would cut them elsewhere
                (and what saves what the data of such a gate overwrites: `data_for_hook` is called in this order, too)
   100          the engine is paused
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.protocol.output import EngineOutput
    from quire.protocol.plan import StepPlan
    from quire.protocol.request import EngineRequest
    from quire.scheduler.request import Request


class Gate:
    """Base class: it blocks nothing. A feature overrides the methods that it needs. No torch here."""

    name = "gate"
    order = 50
    saves_preempted = False
    """Blocks of preempted requests are saved: for the text of a warning."""
    meets_limits = False
    """A request can continue from the blocks that `can_load` counts: the gate has asked every `PrefixLimit`, or loads what the limit needs."""

    def receive(self, received: EngineRequest, number: int) -> EngineRequest:
        """A request arrives, the scheduler's `number`-th. Returns it, maybe with other fields.

        Raises:
            ValidationError: it can never run.
        """
        return received

    def begin(self, running: Sequence[Request]) -> None:
        """A plan begins; `running`: the requests with a row."""

    def ready(self, request: Request) -> bool:
        """May the scheduler consider this waiting request? False: skip it. May start work that the request needs."""
        return True

    def is_blocking(self, request: Request) -> bool:
        """Does this gate block the waiting request? For statistics, so it must change nothing.

        Override it if `ready` has a side effect.
        """
        return not self.ready(request)

    def allow(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of the tokens [start, start + num_tokens) of the request may run in this step, from `start` on.

        Tokens before `start` are computed, or in the prefix cache. 0: none; later waiting requests are not admitted
        either.
        """
        return num_tokens

    def enter(self, request: Request) -> None:
        """The request got a row."""

    def leave(self, request: Request) -> None:
        """The request lost its row: finished, aborted or preempted."""

    def can_load(self, request: Request, start: int) -> int:
        """How many tokens of the waiting request, from `start` on, this gate has the keys and values of. Changes nothing.

        Tokens before `start` are in the prefix cache. After a load that failed, a gate should answer with fewer.
        """
        return 0

    def load(self, request: Request, start: int, num_tokens: int) -> None:
        """The request owns blocks for tokens [start, start + num_tokens), which are full blocks, and more; and no row. Null blocks
        (outside a window) need nothing. What is sent with a plan (`data_for_hook`) must be written before its step reads."""

    def loaded(self, request: Request) -> bool | None:
        """Will the tokens be in the blocks before the next step reads them? Asked at once after `load`, then before each plan.

        None: not yet; the request gets no row. False: they never will; its blocks are freed, and the tokens are computed. After True
        the gate is told either that the request got a row (`enter`), or that it lost the blocks (`release`, `revoke`).
        """
        return True

    def release(self, request: Request) -> bool:
        """May the scheduler free the blocks of this request? It has lost its row, or what this gate loads is not needed any more.

        False: hold `request.blocks` back. The scheduler asks again before each plan, and at least every 0.2 s
        (`LOOK_AGAIN_S`), until every gate has answered True once.
        """
        return True

    def revoke(self, request: Request) -> None:
        """The blocks that this gate holds back are freed now, because all are: it must not use them any more."""

    def failed(self, step: int) -> set[int]:
        """A step failed. Returns the blocks of requests that this gate's data would have filled: they are unpublished, and
        running requests that use them end with an error."""
        return set()

    def on_late_error(self, request: Request) -> None:
        """A step that was in flight when the request ended has failed for it: what the step has computed is wrong."""

    def on_waiting_ended(self, request: Request) -> None:
        """The request ended while it waited."""

    def data_for_hook(self, plan: StepPlan) -> bytes | None:
        """Data for the worker's hook of the same name, as plan.extras[name].

        While blocks are loaded or held back, or a gate `wants_plan`, a plan without work is sent too if a gate has data for it.
        """
        return None

    def wants_plan(self) -> bool:
        """Has it, or will it soon have, data that should not wait for the next request? The scheduler plans at least every
        0.2 s (`LOOK_AGAIN_S`) while it has."""
        return False

    def data_from_hook(self, extra: bytes) -> None:
        """Data from the worker's hook of the same name."""

    def add_output_details(self, outputs: list[EngineOutput]) -> None:
        """The outputs of a step, after `data_from_hook`: a gate may add to their `details`."""


def any_wants_plan(gates: Sequence[Gate]) -> bool:
    return any(gate.wants_plan() for gate in gates)
