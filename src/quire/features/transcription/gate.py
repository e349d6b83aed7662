"""SoundGate: how many windows of sound a step may encode, so that running requests do not wait for many of them.

Does not know which of them the worker's cache has: each counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from quire.errors import ValidationError
from quire.features.media.gate import EncoderCounts
from quire.protocol.output import EngineOutput
from quire.protocol.request import EngineRequest
from quire.protocol.sound import SOUND
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request


class TranscriptionReport(msgspec.Struct, array_like=True):
    """What the hook reports of a step. `records`: (request, place of the drawn token, attention), see `alignment.py`."""

    counts: EncoderCounts
    records: list[tuple[str, int, bytes]] = []


@dataclass(slots=True)
class SoundGate(Gate):
    """`budget`: windows of a step."""

    budget: int
    counts: dict[str, float]
    left: int = 0
    records: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)

    name = "transcription"
    order = 45

    def receive(self, received: EngineRequest, number: int) -> EngineRequest:
        if [item.kind for item in received.media] != [SOUND]:
            raise ValidationError("a request to this model has one window of sound")
        return received

    def begin(self, running: Sequence[Request]) -> None:
        self.left = self.budget

    def allow(self, request: Request, start: int, num_tokens: int) -> int:
        if start:
            return num_tokens
        if not self.left:
            return 0
        self.left -= 1
        return num_tokens

    def data_from_hook(self, extra: bytes) -> None:
        report = msgspec.msgpack.decode(extra, type=TranscriptionReport)
        counts = report.counts
        for id, place, weights in report.records:
            self.records.setdefault(id, []).append((place, weights))
        self.counts["mm_cache_queries"] += counts.lookups
        self.counts["mm_cache_hits"] += counts.hits
        self.counts["encoder_passes"] += counts.lookups - counts.hits
        self.counts["encoder_rows"] += counts.rows

    def add_output_details(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if (records := self.records.pop(output.id, None)) is not None:
                output.details = {**output.details, self.name: records}

    def leave(self, request: Request) -> None:
        self.records.pop(request.id, None)
