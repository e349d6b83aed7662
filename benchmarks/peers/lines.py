"""How an engine that is measured talks to `python -m benchmarks peers`: one JSON object a line.

    said first      {"about": {...}}                                     it is ready
    asked           {"prompts": [[token, ...], ...], "output": tokens of each}
    answered        {"seconds": ..., "tokens": [[token, ...], ...]}

Standard library only: every engine runs in its own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]


def own_output() -> Any:
    """What the caller reads. All else that is printed, by child processes too, goes to stderr from here on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def settle_vllm(asked: dict[str, Any]) -> None:
    """Before vLLM is imported on a CPU: its threads and its cache.

    By itself it leaves one core to its other processes, and runs on the others: one, of two.
    """
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{asked['threads'] - 1}")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(asked["kv_gib"])


def serve(answers: Any, about: dict[str, Any], generate: Generate) -> None:
    """Until stdin ends."""
    print(json.dumps({"about": about}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        tokens = generate(asked["prompts"], asked["output"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)
