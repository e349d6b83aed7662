"""OutputDelta: the new output of one completion, between the engine's stream and an answer's shape.

Knows texts, tokens and parsed parts. Does not know how they are produced or encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.frontend.parsers.call_writer import CallDelta
from quire.server.openai.logprobs import Position


class OutputDelta(msgspec.Struct):
    """The new output of one completion; after `add`, of several steps."""

    prompt: int
    index: int
    """Index of the completion: prompt-major over the HTTP request."""
    text: str
    tokens: list[int]
    logprobs: Sequence[Position] | None
    finish_reason: str | None
    stop_reason: int | str | None
    reasoning: str = ""
    """The reasoning, which is not in `text`."""
    calls: list[CallDelta] = []

    def add(self, later: OutputDelta) -> None:
        self.text += later.text
        self.reasoning += later.reasoning
        self.calls = merged(self.calls, later.calls)
        self.tokens += later.tokens
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


def merged(calls: list[CallDelta], later: list[CallDelta]) -> list[CallDelta]:
    """Merge later deltas into `calls`."""
    known = {call.index: call for call in calls}
    for call in later:
        if (before := known.get(call.index)) is None:
            calls.append(call)
            known[call.index] = call
        else:
            before.arguments += call.arguments
    return calls
