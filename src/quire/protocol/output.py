"""Engine protocol, engine to frontend: new tokens of requests, and the state of the engine.

Knows token ids, log-probabilities and numbers. Does not know text or HTTP.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from msgspec import Struct

from quire.protocol.pooling_info import PoolingInfo
from quire.protocol.tensor_data import TensorData

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
FINISHES: tuple[FinishReason, ...] = get_args(FinishReason)
ErrorKind = Literal["invalid", "overloaded", "reported", "processor", "internal"]
"""HTTP 400, 503, and three times 500. The text of `internal` errors, and of logits processors, may quote anything; the
others are written for clients."""


class Logprobs(Struct, array_like=True, omit_defaults=True, gc=False):
    """For each of P positions the chosen token first, then the most likely tokens, best first.

    `token_ids[p][0]` is the token at position `start + p`; entries 1.. are the top-k (the chosen token
    may occur there again). `ranks[p]` is the chosen token's rank, from 1. Positions count from the
    first token of the prompt, so a receiver can detect a position that it gets twice (after a preemption).
    """

    start: int
    token_ids: list[list[int]]
    values: list[list[float]]
    ranks: list[int]

    def first(self, count: int) -> Logprobs:
        """Those of the first `count` positions."""
        if count >= len(self.ranks):
            return self
        return Logprobs(self.start, self.token_ids[:count], self.values[:count], self.ranks[:count])


class EngineOutput(Struct, array_like=True, omit_defaults=True, gc=False, tag="output"):
    """What is new about one request since its last EngineOutput."""

    id: str
    tokens: list[int]
    finish: FinishReason | None = None
    stopped_by: int | str | None = None  # the stop token; None: the model's end-of-text token
    error: str | None = None  # the reason, when finish is "error"
    error_kind: ErrorKind = "internal"
    logprobs: Logprobs | None = None  # one position for each token of `tokens`
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache already had
    preemptions: int = 0
    queued: float = 0.0  # seconds it waited before its first step
    client: int = 0
    tensor: TensorData | None = None  # the output of a request that generates no tokens
    details: dict[str, Any] = {}  # by gate: what it reports of the request and this step
    engine: int = 0  # its place among the engines of a frontend, which sets it
    num_cache_creation_tokens: int = 0  # prompt tokens that it wrote to the prefix cache
    loaded_tokens: dict[str, int] = {}  # of num_cached_tokens, those that a gate loaded, by source
    # its first tokens came from an engine that died, and the bits of this one may differ; the frontend sets it
    resumed: bool = False


class Reply(Struct, array_like=True, omit_defaults=True, gc=False, tag="reply"):
    """The answer to a `Call`: a value, or an error text."""

    id: int
    value: Any = None
    error: str | None = None
    client: int = 0
    error_kind: ErrorKind = "internal"


class EngineStats(Struct, array_like=True, omit_defaults=True, gc=False, tag="stats"):
    """A snapshot of the engine, for /metrics, the log line and `LLM.get_metrics()`. Counters never decrease."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    num_blocks: int = 0
    block_size: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = {}  # by FinishReason
    steps: int = 0
    deferred: int = 0  # waiting requests that a gate blocks (scheduler/gate.py)
    histograms: dict[str, list[float]] = {}  # counts by bucket, then the sum
    state: str = "awake"  # or the level of sleep (engine/sleep.py)
    counts: dict[str, float] = {}  # optional counters, if they are configured
    labels: dict[str, str] = {}  # texts of features, for labels of metrics


class EngineReady(Struct, array_like=True, omit_defaults=True, gc=False, tag="ready"):
    """The message that ends a successful start of the engine."""

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    dtype: str
    device: str
    architecture: str
    model_impl: str  # "native", or a sentence about the Transformers backend
    depth: int
    startup: list[tuple[str, float]] = []  # stage, seconds
    pid: int = 0
    version: str = ""
    num_tokens: int = 0  # capacity of the KV cache, 0: there is none
    max_num_seqs: int = 0
    state_bytes: int = 0  # recurrent states of all rows, and their checkpoints
    pooling: PoolingInfo | None = None  # None: the model generates tokens
    embedding_size: int = (
        0  # features of an embedding, if prompts may be embeddings; 0: they may not
    )
    batch_invariant: bool = False  # a request's bits do not depend on batches and chunks


class StartupStatus(Struct, array_like=True, gc=False, frozen=True, tag="startup"):
    """How far the start of an engine is."""

    stage: str
    """What it does now, in a few words."""
    progress: float = 0.0
    """Share of the weights that is loaded, 0 to 1."""

    def __str__(self) -> str:
        share = f" ({self.progress:.0%})" if 0 < self.progress < 1 else ""
        return f"{self.stage}{share}"


class EngineDied(Struct, array_like=True, omit_defaults=True, gc=False, tag="died"):
    """The engine could not start, or has failed: what happened, and what to do about it."""

    error: str
    traceback: str = ""


class Heartbeat(Struct, array_like=True, gc=False, tag="beat"):
    """A sign of life: how long the current step has run, and how long it may run (seconds)."""

    steps: int
    busy: float
    allowed: float


class EngineOpen(Struct, array_like=True, gc=False, tag="open"):
    """An HTTP process accepts requests; `chats`: the model has a chat template."""

    chats: bool


FromEngine = EngineOutput | Reply | EngineStats  # to a frontend
Lifeline = StartupStatus | EngineReady | EngineDied | Heartbeat | EngineOpen  # to the supervisor
