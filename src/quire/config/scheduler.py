"""SchedulerConfig: how many requests run at once, in which order, and how far the host runs ahead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """The step: rows, tokens, order."""

    max_num_seqs: int | None = None
    """The most requests that run at once; unset: 256."""
    max_num_batched_tokens: int | None = None
    """Tokens a step; unset: what the platform prefers."""
    enable_chunked_prefill: bool | None = None
    """Cut a prompt that does not fit in a step; unset: on."""
    long_prefill_token_threshold: int = 0
    """The most tokens of one prompt in one step; 0: no such limit."""
    scheduling_policy: str = "fcfs"
    """fcfs, or priority (lower first, then arrival; the least important is preempted first)."""
    async_scheduling: bool | None = None
    """True: depth 2, the host plans a step while the device runs one; False: depth 1; unset: the platform's."""
    num_scheduler_steps: int = 1
    """Old name: above 1 means async_scheduling."""
    preemption_mode: str | None = None
    """recompute; swap is accepted and recomputes."""
    max_num_queued_reqs: int | None = None
    """The most requests that may wait; more are refused (503). Unset: no limit below the server's own."""
    max_num_queued_tokens: int | None = None
    """The most prompt tokens that may wait; more are refused (503)."""
