"""MediaGate: how many rows of the towers a step may compute.

An item (a picture, a video, sound) is encoded whole, in the step that computes the first of its tokens. Knows where items are in prompts. Does not
know which of them the worker's cache has: each counts in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from quire.errors import ValidationError
from quire.protocol.media import KINDS
from quire.protocol.request import EngineRequest
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request


class EncoderCounts(msgspec.Struct, array_like=True):
    """What the hook reports of a step."""

    lookups: int
    hits: int
    rows: int
    seconds: float = 0.0
    cache_bytes: int = 0
    cache_bytes_max: int = 0


@dataclass(slots=True)
class MediaGate(Gate):
    """
    Attributes:
        budget: rows of a step, and of the largest item.
        whole: the most tokens of an item, if a step computes all of them or none; 0: it may compute a part.
        whole_prompts: `whole` is the most tokens of a prompt with items, whose tokens all attend to each other. So it shares keys and
            values with equal prompts only, and with none if it exceeds `window`, as old keys of layers with a window are gone.
        window: of the layer with the smallest; 0: there is none.
    """

    budget: int
    whole: int
    counts: dict[str, float]
    whole_prompts: bool = False
    window: int = 0
    left: int = 0

    name = "media"
    order = 70

    def receive(self, received: EngineRequest, number: int) -> EngineRequest:
        end = 0
        for item in received.media:
            if item.kind not in KINDS:
                continue
            most = min(self.budget, self.whole or self.budget)
            if item.length > most or item.start < end or item.length < 1:
                raise ValidationError("an item has too many tokens, or another item's place")
            end = item.start + item.length
        if end > len(received.tokens):
            raise ValidationError("an item has its place after the prompt")
        if not (end and self.whole_prompts):
            return received
        if received.prompt_length > self.whole:
            raise ValidationError(
                f"the tokens of a prompt with pictures attend to each other, so a step computes all of them: the prompt has"
                f" {received.prompt_length} tokens, a step at most {self.whole} (--max-num-batched-tokens): shorten it"
            )
        params = received.params
        if 0 < self.window < received.prompt_length:
            params = msgspec.structs.replace(params, skip_reading_prefix_cache=True)
        return msgspec.structs.replace(received, salt=salt_of_prompt(received), params=params)

    def begin(self, running: Sequence[Request]) -> None:
        self.left = self.budget

    def allow(self, request: Request, start: int, num_tokens: int) -> int:
        end = start + num_tokens
        if self.whole_prompts and start < request.num_prompt:
            return self._allow_prompt(request, start, num_tokens)
        for item in request.media:
            first, last = item.start, item.start + item.length
            if item.kind not in KINDS or first >= end or last <= start:
                continue
            cut = self.whole > 0 and last > end
            if cut or (item.length > self.left and self.left < self.budget):
                return max(first - start, 0)
            self.left = max(self.left - item.length, 0)
        return num_tokens

    def _allow_prompt(self, request: Request, start: int, num_tokens: int) -> int:
        """All tokens of a prompt with items, or none."""
        items = [item for item in request.media if item.kind in KINDS]
        if not items:
            return num_tokens
        needed = sum(item.length for item in items if item.start + item.length > start)
        too_many = needed > self.left and self.left < self.budget
        if start + num_tokens < request.num_prompt or too_many:
            return 0
        self.left = max(self.left - needed, 0)
        return num_tokens

    def data_from_hook(self, extra: bytes) -> None:
        counts = msgspec.msgpack.decode(extra, type=EncoderCounts)
        self.counts["mm_cache_queries"] += counts.lookups
        self.counts["mm_cache_hits"] += counts.hits
        self.counts["encoder_passes"] += counts.lookups - counts.hits
        self.counts["encoder_rows"] += counts.rows
        self.counts["encoder_seconds"] += counts.seconds
        self.counts["encoder_cache_bytes"] = counts.cache_bytes
        self.counts["encoder_cache_bytes_max"] = counts.cache_bytes_max


def salt_of_prompt(received: EngineRequest) -> str:
    """What only requests with the same salt, prompt and items have."""
    items = [(item.hash, item.start, item.length) for item in received.media]
    whole = received.salt, received.tokens[: received.prompt_length], items
    return blake2b(msgspec.msgpack.encode(whole), digest_size=20).hexdigest()
