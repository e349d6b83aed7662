"""What `quire doctor` says of kept KV blocks (--kv-disk-dir, --kv-remote-url): their size, when a load is worth it, how long a
disk lasts.

Knows the layout of the KV cache. Measures nothing: a server measures both rates while it runs, and writes the rate of prompts
into the folder.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import repeat
from pathlib import Path

from quire.config.engine import Resolved
from quire.kvstore.disk import DAY_S
from quire.kvstore.segments import DESCRIPTION, RATE, identities
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


def measured_rate(resolved: Resolved) -> float:
    """Prompt tokens per second of the last server with this model and folder; 0: none has measured it."""
    found: list[tuple[float, float]] = []
    if (root := resolved.config.cache.kv_disk_dir) is None:
        return 0.0
    with suppress(OSError):
        for folder in identities(Path(root).expanduser()):
            with suppress(OSError, ValueError, AttributeError):
                file = folder / RATE
                facts = json.loads((folder / DESCRIPTION).read_text())
                if facts.get("model") == resolved.path and facts.get("dtype") == resolved.dtype:
                    found.append((file.stat().st_mtime, float(file.read_text())))
    return max(found)[1] if found else 0.0


def kept_blocks(resolved: Resolved, plan: MemoryPlan) -> list[str]:
    """The section "Kept KV blocks"; none if no folder keeps them."""
    cache, num_bytes = resolved.config.cache, token_bytes(plan)
    states = plan.state_bytes if plan.num_checkpoints else 0
    if not (cache.kv_disk_dir or cache.kv_remote_url) or not (num_bytes or states):
        return []
    if not num_bytes:
        return ["Kept recurrent states\n" + table(_of_states(resolved, states, 0))]
    each = num_bytes * PER_SECOND
    days = {
        "always": f"{_days(WRITES / (each * DAY_S))} at {PER_SECOND} new tokens per second",
        "auto": f"{_days(WRITES / (cache.kv_disk_size * GIB))} at least, as it writes {cache.kv_disk_size:g} GiB a day at most of blocks that only one request has used",
        "second-use": f"{_days(WRITES / (each * DAY_S))} if {PER_SECOND} tokens per second are used a second time",
    }
    rows = [
        ("one token", f"{size(num_bytes)}; {cache.kv_disk_size:g} GiB keep {int(cache.kv_disk_size * GIB / num_bytes):,} tokens"),
        ("break-even", f"a disk or server that reads {size(each)} per second is as fast as computing {PER_SECOND} prompt tokens per second"),
    ]  # fmt: skip
    if states:
        rows += _of_states(resolved, states, num_bytes)
    if rate := measured_rate(resolved):
        rows.append(("on this machine", f"the last server computed {rate:.0f} prompt tokens per second: {size(int(rate * num_bytes))} per second is as fast"))  # fmt: skip
    if cache.kv_disk_dir:
        rows.append(("disk life", f"{days[cache.kv_disk_write]} (600 TB of writes, kv_disk_write={cache.kv_disk_write})"))  # fmt: skip
    return ["Kept KV blocks\n" + table(rows)]


def _of_states(resolved: Resolved, states: int, num_bytes: int) -> list[tuple[str, str]]:
    """The rows of a model whose states have this many bytes, and its tokens `num_bytes`."""
    interval = resolved.checkpoint_interval
    where = (
        f"at the end of a prompt, and every {interval} tokens"
        if interval
        else "at the end of a prompt"
    )
    as_tokens = f", as many as {states // num_bytes:,} tokens" if num_bytes else ""
    rows = [("one recurrent state", f"{size(states)}{as_tokens}; kept {where}")]
    if rate := measured_rate(resolved) if not num_bytes else 0.0:
        each = int(rate * states / PER_SECOND)
        rows.append(("on this machine", f"the last server computed {rate:.0f} prompt tokens per second: with {PER_SECOND} tokens for each state, {size(each)} per second is as fast"))  # fmt: skip
    return rows


def _days(days: float) -> str:
    return f"{days / 365:.0f} years" if days > 730 else f"{days:.0f} days"
