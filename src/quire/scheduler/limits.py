"""SchedulerLimits: the limits of a step and of the scheduler, and which requests they refuse.

Knows sizes. Does not know which requests run.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kvcache.manager import KVManager
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.request import Request
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
    # tokens after a step's tokens that a row may have blocks for, where blocks are free
    lookahead: int = 0
    depth: int = 1  # steps that may be in flight at once
    run_ahead: bool = True  # False: a row is planned again only when its next token is known
    by_priority: bool = False
    max_waiting: int = 0  # the most requests that may wait; 0: no limit
    max_waiting_tokens: int = 0  # the most prompt tokens that may wait; 0: no limit

    @property
    def max_tokens_in_flight(self) -> int:
        """The most tokens of one request whose KV the steps in flight write."""
        step = min(self.max_step_tokens, self.max_length)
        return step + (self.depth - 1) * (1 + self.drafts)

    def num_ahead(self, request: Request, num_tokens: int, num_running: int, kv: KVManager) -> int:
        """Extra tokens to allocate blocks for (`lookahead`), as long as every running request could still get another block."""
        if len(kv.pool.free) <= num_running * len(kv.groups):
            return 0
        end = request.num_computed_tokens + num_tokens
        return max(min(self.lookahead, request.limit - end), 0)

    def impossible(self, request: EngineRequest, kv: KVManager) -> str | None:
        """Why this request could not run even alone, or None."""
        num_prompt, max_tokens = request.prompt_length, 0
        sizes = f"the prompt has {num_prompt} tokens"
        if isinstance(request.params, SamplingParams):
            max_tokens = request.params.max_tokens or 0
            sizes += f" and max_tokens is {max_tokens}"
            if not max_tokens:
                return f"{sizes}: max_tokens must be at least 1"
        if not num_prompt:
            return "the prompt is empty: a request needs at least one token"
        if num_prompt + max_tokens > self.max_length:
            return f"{sizes}: that exceeds max_model_len={self.max_length}"
        if reason := _wrong_encoder_input(request.num_encoder_tokens, kv.max_encoder_len):
            return reason
        num_blocks = kv.max_blocks(
            num_prompt + max_tokens, self.max_tokens_in_flight, request.num_encoder_tokens
        )
        if num_blocks > kv.pool.usable:
            return (
                f"{sizes}: that needs {num_blocks} KV blocks of {kv.block_size} tokens and there are"
                f" {kv.pool.usable}; shorten it, or raise gpu_memory_utilization or"
                " kv_cache_memory_bytes"
            )
        return None

    def overloaded(self, request: EngineRequest, waiting: WaitingQueue) -> str | None:
        """Why this request may not be queued now, or None. One that ran in an engine that died was admitted there."""
        if request.num_prompt:
            return None
        if 0 < self.max_waiting <= len(waiting):
            return f"{len(waiting)} requests are already waiting (max_num_queued_reqs)"
        if 0 < self.max_waiting_tokens < waiting.num_tokens + len(request.tokens):
            return f"{waiting.num_tokens} prompt tokens are already waiting (max_num_queued_tokens)"
        return None


def _wrong_encoder_input(num_states: int, max_states: int) -> str | None:
    """Why a request with an encoder input of this length cannot run, or None. max_states: 0: no cross attention."""
    if num_states and not max_states:
        return "the request has an input for an encoder, and the model has no cross attention"
    if num_states > max_states:
        return (
            f"the encoder makes {num_states} states of the request's input, and the model attends to"
            f" {max_states} at most; shorten the input"
        )
    if max_states and not num_states:
        return (
            "the model attends to an encoder's states, and the request has no input for the encoder"
        )
    return None
