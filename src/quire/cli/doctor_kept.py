"""What `quire doctor` says of kept KV blocks (--kv-disk-dir): their size, when a load is worth it, how long a disk lasts.

Knows the layout of the KV cache. Measures nothing: a server measures both rates while it runs, and its log says them.
"""

from __future__ import annotations

from itertools import repeat

from quire.config.engine import Resolved
from quire.kvstore.disk import DAY_S
from quire.startup_timer import table
from quire.worker.memory_plan import GIB, MemoryPlan, size

WRITES = 600e12
"""Bytes that a usual consumer drive of 1 TB may write in its life."""
PER_SECOND = 1000
"""Tokens per second in the examples."""


def token_bytes(plan: MemoryPlan) -> int:
    """Bytes of keys and values of one token, over all layers."""
    return sum(
        spec.bytes_per_token
        for group in plan.layout.groups
        for _, spec in zip(group.layers, group.shapes or repeat(group.spec), strict=False)
    )


def kept_blocks(resolved: Resolved, plan: MemoryPlan) -> list[str]:
    """The section "Kept KV blocks"; none if no folder keeps them."""
    cache, num_bytes = resolved.config.cache, token_bytes(plan)
    if cache.kv_disk_dir is None or not num_bytes:
        return []
    each = num_bytes * PER_SECOND
    days = {
        "always": f"{_days(WRITES / (each * DAY_S))} at {PER_SECOND} new tokens per second",
        "auto": f"{_days(WRITES / (cache.kv_disk_size * GIB))} at least, as it writes {cache.kv_disk_size:g} GiB a day at most of blocks that only one request has used",
        "second-use": f"{_days(WRITES / (each * DAY_S))} if {PER_SECOND} tokens per second are used a second time",
    }
    rows = [
        ("one token", f"{size(num_bytes)}; {cache.kv_disk_size:g} GiB keep {int(cache.kv_disk_size * GIB / num_bytes):,} tokens"),
        ("break-even", f"a disk that reads {size(each)} per second is as fast as computing {PER_SECOND} prompt tokens per second"),
        ("disk life", f"{days[cache.kv_disk_write]} (600 TB of writes, kv_disk_write={cache.kv_disk_write})"),
    ]  # fmt: skip
    return ["Kept KV blocks\n" + table(rows)]


def _days(days: float) -> str:
    return f"{days / 365:.0f} years" if days > 730 else f"{days:.0f} days"
