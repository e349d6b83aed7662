"""`quire bench latency`: the time of one batch, measured repeatedly in this process.

Options, printout and the keys of the result file are the same as of `vllm bench latency`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tqdm

from quire.bench.cli import (
    BenchArgs,
    BenchOption,
    keep,
    percentiles,
    prompts,
    run_command,
    sampling,
    start,
)

OWN = {
    "input_len": BenchOption(32, "tokens per prompt"),
    "output_len": BenchOption(128, "tokens per output"),
    "batch_size": BenchOption(8, "prompts per batch"),
    "n": BenchOption(1, "outputs per prompt"),
    "use_beam_search": BenchOption(False, "use beam search with n beams", bool),
    "num_iters_warmup": BenchOption(10, "warm-up runs that are not measured"),
    "num_iters": BenchOption(30, "runs"),
    "disable_detokenize": BenchOption(False, "do not detokenize", bool),
    "output_json": BenchOption(None, "write the result to this file", Path),
}
ABOUT = "Measure the latency of a batch of prompts."


def main(argv: Sequence[str]) -> int:
    # Every run uses the same prompts: a prefix cache would skip their prefill.
    return run_command(
        "quire bench latency", ABOUT, OWN, argv, measure, {"enable_prefix_caching": False}
    )


def measure(args: BenchArgs) -> int:
    own = args.own
    with start(args.engine) as llm:
        run = _work(llm, own)
        for _ in tqdm.trange(own["num_iters_warmup"], desc="warm-up"):
            run()
        seconds = []
        for _ in tqdm.trange(own["num_iters"], desc="runs"):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
    result = {
        "avg_latency": statistics.fmean(seconds),
        "latencies": seconds,
        "percentiles": percentiles(seconds),
    }
    print(f"Avg latency: {statistics.fmean(seconds)} seconds")
    for name, value in percentiles(seconds).items():
        print(f"{name}% percentile latency: {value} seconds")
    keep(own["output_json"], result)
    return 0


def _work(llm: Any, own: Mapping[str, Any]) -> Callable[[], object]:
    from quire.protocol.sampling_params import BeamSearchParams

    batch = prompts(llm, own["batch_size"], own["input_len"])
    if own["use_beam_search"]:
        search = BeamSearchParams(
            beam_width=own["n"], max_tokens=own["output_len"], ignore_eos=True
        )
        return lambda: llm.beam_search(batch, search)
    params = sampling(own, own["output_len"])
    return lambda: llm.generate(batch, params, use_tqdm=False)
