"""The protocol between a measured engine and `python -m benchmarks peers`: one JSON object per line.

    engine, when ready      {"about": {...}}
    request                 {"prompts": [[token, ...], ...], "output": tokens of each}
    response                {"seconds": ..., "tokens": [[token, ...], ...]}

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
    """The pipe to the caller. Everything else that this process and its children print then goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def settle_vllm(asked: dict[str, Any]) -> None:
    """Set vLLM's threads and KV cache size on a CPU, before vLLM is imported.

    By default vLLM leaves one core to its other processes: on two cores it would compute on one.
    """
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{asked['threads'] - 1}")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(asked["kv_gib"])


def serve(answers: Any, about: dict[str, Any], generate: Generate) -> None:
    """Answer requests until stdin ends."""
    print(json.dumps({"about": about}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        tokens = generate(asked["prompts"], asked["output"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)
