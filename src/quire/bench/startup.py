"""`quire bench startup`: seconds until a new process has a ready model, and until its first token.

Names are the same as of `vllm bench startup`. Cold: the compilation caches are empty. Warm: they are full. The file of the
weights is in the page cache in both cases, since dropping it needs more rights than a benchmark should have.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tqdm

from quire import env
from quire.bench.cli import BenchArgs, BenchOption, keep, percentiles, prompts, run_command, start
from quire.errors import StartupError

OWN = {
    "num_iters_cold": BenchOption(3, "cold starts"),
    "num_iters_warmup": BenchOption(1, "warm-up starts that are not measured"),
    "num_iters_warm": BenchOption(3, "warm starts"),
    "output_json": BenchOption(None, "write the result to this file", Path),
}
ABOUT = "Measure the time from process start until the model is ready, and until the first token."
READY, TOKEN = "ready", "token"
PATIENCE_S = 600


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--child"]:
        return child(json.loads(argv[1]))
    return run_command("quire bench startup", ABOUT, OWN, argv, measure)


def child(keywords: dict[str, Any]) -> int:
    """The measured process: starts, reports it, generates one token, reports it."""
    from quire.protocol.sampling_params import SamplingParams

    with start(keywords) as llm:
        print(READY, flush=True)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        llm.generate(prompts(llm, 1, 8), params, use_tqdm=False)
        print(TOKEN, flush=True)
    return 0


def once(keywords: dict[str, Any], cache: str) -> tuple[float, float]:
    """Seconds until ready and until the first token.

    Raises:
        StartupError: the process ended too early; the message has the end of its stderr.
    """
    words = [sys.executable, "-P", "-m", "quire.bench", "startup", "--child", json.dumps(keywords)]
    times = {}
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=said, text=True, env=env.for_a_child(QUIRE_CACHE_ROOT=cache)
        ) as process:  # fmt: skip
            for line in process.stdout or ():
                times[line.strip()] = time.perf_counter() - began
            process.wait(PATIENCE_S)
        if READY not in times or TOKEN not in times:
            said.seek(0)
            raise StartupError(f"the engine did not start (status {process.returncode}):\n{said.read()[-2000:]}")  # fmt: skip
    return times[READY], times[TOKEN]


def measure(args: BenchArgs) -> int:
    own, keywords = args.own, args.engine
    found: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in tqdm.trange(own["num_iters_cold"], desc="cold starts"):
        with tempfile.TemporaryDirectory() as empty:
            found["cold"].append(once(keywords, empty))
    with tempfile.TemporaryDirectory() as kept:
        once(keywords, kept)  # fills the caches
        for _ in range(own["num_iters_warmup"]):
            once(keywords, kept)
        for _ in tqdm.trange(own["num_iters_warm"], desc="warm starts"):
            found["warm"].append(once(keywords, kept))
    result: dict[str, Any] = {}
    for name, pairs in found.items():
        for what, seconds in zip(("startup", "first_token"), zip(*pairs, strict=True), strict=True):
            result[f"avg_{name}_{what}_time"] = statistics.fmean(seconds)
            result[f"{name}_{what}_times"] = list(seconds)
            result[f"{name}_{what}_percentiles"] = percentiles(seconds)
            words = f"{name} {what.replace('_', ' ')}"
            print(f"Avg {words} time: {statistics.fmean(seconds):.2f} seconds", flush=True)
    keep(own["output_json"], result)
    return 0
