"""SchedulerLimits: the limits of a step and of the scheduler, and which requests they refuse.

Knows sizes. Does not know which requests run.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kvcache.manager import KVManager
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """The limits of a step and of the scheduler."""

    max_rows: int
    max_step_tokens: int
    max_length: int  # prompt plus output of one request
    chunked: bool = True  # False: a prompt is computed in one step or waits
    max_chunk: int = 0  # the most tokens of one prompt in a step; 0: the step's token budget
    drafts: int = 0  # draft tokens that a row may have beyond its next token
    depth: int = 1  # steps that may be in flight at once
    run_ahead: bool = True  # False: a row is planned again only when its next token is known
    by_priority: bool = False
    max_waiting: int = 0  # the most requests that may wait; 0: no limit
    max_waiting_tokens: int = 0  # the most prompt tokens that may wait; 0: no limit

    @property
    def most_ahead(self) -> int:
        """The most tokens of one request whose KV the steps in flight write."""
        step = min(self.max_step_tokens, self.max_length)
        return step + (self.depth - 1) * (1 + self.drafts)

    def impossible(self, received: EngineRequest, kv: KVManager) -> str | None:
        """Why this request could not run even alone, or None."""
        prompt, most = len(received.tokens), 0
        asks = f"the prompt has {prompt} tokens"
        if isinstance(received.params, SamplingParams):
            most = received.params.max_tokens or 0
            asks += f" and max_tokens is {most}"
            if not most:
                return f"{asks}: max_tokens must be at least 1"
        if not prompt:
            return "the prompt is empty: a request needs at least one token"
        if prompt + most > self.max_length:
            return f"{asks}: that exceeds max_model_len={self.max_length}"
        need = kv.most_blocks(prompt + most + self.drafts, self.most_ahead)
        if need > kv.pool.usable:
            return (
                f"{asks}: that needs {need} KV blocks of {kv.block_size} tokens and there are"
                f" {kv.pool.usable}; shorten it, or raise gpu_memory_utilization or"
                " kv_cache_memory_bytes"
            )
        return None

    def overloaded(self, received: EngineRequest, waiting: WaitingQueue) -> str | None:
        """Why this request may not be queued now, or None."""
        if 0 < self.max_waiting <= len(waiting):
            return f"{len(waiting)} requests are already waiting (max_num_queued_reqs)"
        if 0 < self.max_waiting_tokens < waiting.num_tokens + len(received.tokens):
            return f"{waiting.num_tokens} prompt tokens are already waiting (max_num_queued_tokens)"
        return None
