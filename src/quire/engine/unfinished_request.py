"""UnfinishedRequest: what a frontend must know of a request so that it survives the death of its engine.

    request.tokens     |------- prompt -------|--- from engines that died ---|
    tokens                                                                   |--- from this engine ---|

The next engine gets all of them as one request, with `num_prompt`. To a scheduler and a worker that is a request which was
preempted: positions, seeds, penalties, stop tokens, the state of a grammar and limits follow from the prompt's length and the
tokens. Knows tokens and counts. Does not know engines.
"""

from __future__ import annotations

import msgspec

from quire.protocol.output import EngineOutput
from quire.protocol.request import EngineRequest

MAX_DEATHS = 3
"""A request that may be the cause of more deaths ends, though it has passed each trial."""


class UnfinishedRequest:
    """A request that was sent to an engine, and what came back.

    Attributes:
        request: as it was sent last.
        tokens: that this engine has sent.
        sent: how often this client has sent it.
        has_started: this engine has sent something.
        aborted: the frontend has aborted it.
    """

    __slots__ = ("aborted", "has_started", "request", "sent", "tokens")

    def __init__(self, request: EngineRequest):
        self.request, self.sent, self.has_started, self.aborted = request, 1, False, False
        self.tokens: list[int] = []

    def add(self, output: EngineOutput) -> bool:
        """Add the tokens of an output to this request. Returns whether the request has passed its trial with these tokens."""
        self.has_started = True
        self.tokens += output.tokens
        trial_length, length = self.request.trial_length, len(self.request.tokens)
        if not trial_length or length + len(self.tokens) < trial_length:
            return False
        self.request.trial_length = 0
        return True

    @property
    def is_on_trial(self) -> bool:
        return self.request.trial_length > 0

    @property
    def may_go_on(self) -> bool:
        """Whether another engine may have it, although it ran in this one."""
        return self.request.deaths < MAX_DEATHS

    def go_on(self, num_computed: int, is_blamed: bool) -> None:
        """Make `request` what the next engine must get.

        num_computed: tokens that the dead engine had of it, as far as that is known: it may have died before it sent the last.
        is_blamed: this request may be why the engine died.
        """
        request = self.request
        tokens = [*request.tokens, *self.tokens]
        self.request = msgspec.structs.replace(
            request, tokens=tokens, num_prompt=request.prompt_length, deaths=request.deaths + is_blamed,
            trial_length=max(num_computed, len(tokens)) + 1,
        )  # fmt: skip
        self.tokens, self.has_started = [], False
