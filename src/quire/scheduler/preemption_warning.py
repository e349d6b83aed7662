"""The warning that a request was preempted because blocks were lacking."""

from __future__ import annotations

from quire.logging import get_logger
from quire.scheduler.request import Request

log = get_logger(__name__)


def warn_of_preemption(request: Request, saves: bool, count: int) -> None:
    """At most every 5 seconds. `saves`: its blocks are kept elsewhere. `count`: preemptions so far."""
    log.warning_every(
        "preemption", 5.0,
        "Request %s is preempted by PreemptionMode.%s mode because there is not enough KV cache space: its %d tokens %s,"
        " which costs time. Raise gpu_memory_utilization or tensor_parallel_size for more KV space, or lower"
        " max_num_seqs or max_num_batched_tokens. total_cumulative_preemption_cnt=%d",
        request.id, "SWAP" if saves else "RECOMPUTE", len(request.tokens),
        "will be loaded again from where their blocks are kept" if saves else "will be computed again",
        count,
    )  # fmt: skip
