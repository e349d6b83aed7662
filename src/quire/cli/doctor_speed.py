"""How fast one request would be: a CPU reads all weights for each token, so the memory's bandwidth decides.

Measures the bandwidth in a fifth of a second. Knows neither torch nor numpy.
"""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

from quire.config.engine import Resolved
from quire.platforms.cpu_affinity import threads_here
from quire.worker.memory_plan import MemoryPlan

BLOCK = 48 << 20  # bytes: larger than a core's share of any cache
SECONDS = 0.2
MOST_THREADS = 16
REACHED = 0.85
"""Of the bandwidth, in the benchmarks of benchmarks/results: 78 to 95 %."""
IN_CACHE = 256 << 20
"""Weights of fewer bytes stay in a cache, in part."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def memory_bandwidth() -> float:
    """Bytes per second that all cores together read and write now. `ctypes.memmove` runs without the GIL."""
    count = max(1, min(MOST_THREADS, threads_here()))
    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(lambda _: copy_rate(), range(count)))


def copy_rate() -> float:
    """Bytes per second of one thread."""
    source, target = ctypes.create_string_buffer(BLOCK), ctypes.create_string_buffer(BLOCK)
    ctypes.memmove(target, source, BLOCK)  # the pages are there from now on
    began, copies = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < SECONDS:
        ctypes.memmove(target, source, BLOCK)
        copies += 1
    return 2 * BLOCK * copies / passed


def tokens_per_second(resolved: Resolved, plan: MemoryPlan, bandwidth: float) -> float | None:
    """Of one request that decodes; None: a mixture of experts reads a part that the files do not tell,
    and small weights stay in a cache.
    """
    small = plan.weights < IN_CACHE
    if small or resolved.device != "cpu" or any(key in resolved.hf_config for key in EXPERTS):
        return None
    return REACHED * bandwidth / plan.weights
