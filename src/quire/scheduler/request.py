"""Request: one generation, or one prompt whose output is a tensor, as the scheduler sees it.

Knows tokens, counts and blocks. Fields that several features share are here (`adapter`, `media`, `num_drafts`, `tenant`,
`is_subrequest`; decision 51). Data of one feature is in `extras`; its state for a request is in a dict of its own package.
`adapter` is a field because the prefix cache needs it: keys and values of different weights must not be shared.

    tokens     |------- prompt -------|--- output, known ---|- pending -|
    computed   |--------- KV written or in flight ----------------|          `num_computed_tokens`, always <= length

`length` is tokens + `num_pending_tokens`; each step moves `num_computed_tokens` towards it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.protocol.output import FinishReason
from quire.protocol.request import EngineRequest, MediaItem, RequestParams
from quire.protocol.sampling_params import SamplingParams

NO_ROW = -1


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """Created from an EngineRequest by `Request.of`."""

    # identity and limits
    id: str
    client: int
    tokens: list[int]
    num_prompt: int
    params: RequestParams
    generates: bool  # False: it has one output, and ends, when its prompt is computed
    number: int  # counts the requests of this scheduler, from 1
    order: tuple[int, float, int]  # (priority, arrival time, number): lower is served first
    adapter: str | None
    media: Sequence[MediaItem]
    root: bytes  # the parent hash of its first block
    limit: int  # the most tokens it may have, prompt included
    stops: frozenset[int]  # tokens that end it
    min_length: int  # tokens it must have before a stop token ends it
    arrived: float
    tenant: str = ""  # the owner of the API key, where that affects the order
    num_encoder_tokens: int = 0  # states of the encoder that its tokens attend to
    is_subrequest: bool = False  # its end is not counted in the statistics
    extras: dict[str, bytes] = field(default_factory=dict)  # by feature name, for gates and hooks
    trial_length: int = 0  # as in EngineRequest

    # progress
    row: int = NO_ROW
    num_computed_tokens: int = 0  # tokens whose KV is written or in flight (upper bound)
    num_pending_tokens: int = 0  # output tokens in flight (upper bound), or an output's tensor
    num_drafts: int = 0  # draft tokens that the worker has at most, which continue it
    blocks: list[list[int]] = field(default_factory=list)  # by KV group
    capacity: int = 0  # tokens that fit in its blocks
    hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0  # leading blocks that other requests may share
    num_cached_blocks: int = 0  # leading blocks that came from the prefix cache
    # (group, hash) by block: what others could find in blocks that left a window
    left_windows: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    # the end, and what is reported
    finish: FinishReason | None = None
    preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    # of num_cached_tokens, those that a gate loaded, by source
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    num_shared_tokens: int = 0  # leading tokens in blocks that it has published
    queued: float = -1.0  # seconds before its first step; -1: not yet

    @classmethod
    def of(cls, received: EngineRequest, number: int, root: bytes, by_priority: bool) -> Request:
        """`number` counts arrivals. SamplingParams.max_tokens must be set (frontend/input_processor.py does that)."""
        params, num_prompt = received.params, received.prompt_length
        limit = min_length = num_prompt
        stops: frozenset[int] = frozenset()
        if isinstance(params, SamplingParams):
            ends = () if params.ignore_eos else params.eos_token_ids
            stops = frozenset((*ends, *params.stop_token_ids))
            limit += params.max_tokens or 0
            min_length += params.min_tokens
        return cls(
            id=received.id,
            client=received.client,
            tokens=list(received.tokens),
            num_prompt=num_prompt,
            params=params,
            generates=isinstance(params, SamplingParams),
            number=number,
            order=(received.priority if by_priority else 0, received.arrived, number),
            adapter=received.adapter,
            media=received.media,
            root=root,
            limit=limit,
            stops=stops,
            min_length=min_length,
            arrived=received.arrived,
            tenant=received.tenant,
            num_encoder_tokens=received.num_encoder_tokens,
            is_subrequest=received.is_subrequest,
            extras=received.extras,
            trial_length=received.trial_length,
        )

    @property
    def is_on_trial(self) -> bool:
        """An engine died while it ran, and it has not yet passed the step in which that happened."""
        return len(self.tokens) < self.trial_length

    @property
    def length(self) -> int:
        return len(self.tokens) + self.num_pending_tokens
