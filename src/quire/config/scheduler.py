"""SchedulerConfig: how many requests run at once, in which order, and how far the host runs ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config.number_types import AtLeast0, AtLeast1


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Scheduling: requests and tokens per step."""

    max_num_seqs: AtLeast1 | None = None
    """Maximum requests that run at once; unset: 256."""
    max_num_batched_tokens: AtLeast1 | None = None
    """Maximum tokens per step; unset: the platform's default."""
    enable_chunked_prefill: bool | None = None
    """Split a prompt that does not fit in one step; unset: on."""
    long_prefill_token_threshold: AtLeast0 = 0
    """Maximum tokens of one prompt per step; 0: no limit."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs, or priority (a lower value runs first, then the earlier arrival; the highest value is preempted first)."""
    async_scheduling: bool | None = None
    """True: depth 2, the host plans a step while the device runs one; False: depth 1; unset: the platform's default."""
    num_scheduler_steps: AtLeast1 = 1
    """Old name: a value above 1 means async_scheduling."""
    resume: Literal["always", "exact", "off"] = "always"
    """After the death of an engine's process, requests that ran in it go on in another: always; exact: only where their tokens are the same bit for bit; off: they end with an error."""
    preemption_mode: Literal["recompute", "swap"] | None = None
    """What happens to a request that is preempted for lack of KV blocks: recompute (its tokens are computed again) or swap (its full blocks are kept in swap_space, 4 GiB if that is 0); unset: swap if swap_space is given."""
    max_num_queued_reqs: AtLeast0 | None = None
    """Maximum waiting requests; the server refuses more with status 503; unset: the server's own limit."""
    max_num_queued_tokens: AtLeast0 | None = None
    """Maximum prompt tokens of waiting requests; the server refuses more with status 503."""
