"""`quire bench throughput`: requests and tokens per second for many prompts at once, in this process.

Options, printout and the keys of the result file are the same as of `vllm bench throughput`. To compare with Transformers:
`python -m benchmarks offline`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench import plot
from quire.bench.cli import BenchArgs, BenchOption, keep, prompts, run_command, sampling, start
from quire.bench.serve import datasets
from quire.errors import ConfigError, QuireError
from quire.frontend.outputs import RequestOutput, error_of
from quire.protocol.lora_request import LoRARequest

OWN = {
    "backend": BenchOption("quire", "quire (vllm is accepted and means the same)", str),
    "dataset_name": BenchOption("random", "random, sharegpt or custom", str),
    "dataset_path": BenchOption(None, "file with prompts", Path),
    "input_len": BenchOption(1024, "tokens per random prompt"),
    "output_len": BenchOption(None, "tokens per output (unset: 128, or the length in the file)"),
    "num_prompts": BenchOption(1000, "prompts"),
    "n": BenchOption(1, "outputs per prompt"),
    "lora_path": BenchOption(
        None,
        "adapter of the requests, each under one of max_loras names; turns --enable-lora on",
        str,
    ),
    "disable_detokenize": BenchOption(False, "do not detokenize", bool),
    "output_json": BenchOption(None, "write the result to this file", Path),
    "plot": BenchOption(None, plot.HELP, Path),
}
ABOUT = "Measure requests and tokens per second with all prompts submitted at once."


def main(argv: Sequence[str]) -> int:
    return run_command("quire bench throughput", ABOUT, OWN, argv, measure)


def measure(args: BenchArgs) -> int:
    own = args.own
    if own["backend"] not in ("quire", "vllm"):
        raise ConfigError(
            f"--backend {own['backend']}: only quire is supported; python -m benchmarks offline compares with"
            " Transformers"
        )
    plot.check(own["plot"])
    adapter = {} if own["lora_path"] is None else {"enable_lora": True}
    with start({**args.engine, **adapter}) as llm:
        batch, lengths = _prompts(llm, own)
        params = [sampling(own, length) for length in lengths]
        loras = _adapters(own["lora_path"], args.engine.get("max_loras", 1), len(batch))
        for lora in {one.lora_name: one for one in loras if one is not None}.values():
            llm.add_lora(lora)
        began = time.perf_counter()
        outputs = llm.generate(batch, params, lora_request=loras)
        seconds = time.perf_counter() - began
    if failed := [error for output in outputs if (error := error_of(output)) is not None]:
        raise QuireError(f"{len(failed)} requests failed, the first one: {failed[0]}")
    tokens_in = sum(len(output.prompt_token_ids) for output in outputs)
    tokens_out = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    total = tokens_in + tokens_out
    print(
        f"Throughput: {len(outputs) / seconds:.2f} requests/s, {total / seconds:.2f} total tokens/s,"
        f" {tokens_out / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {tokens_in}")
    print(f"Total num output tokens:  {tokens_out}")
    result = {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": total,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": total / seconds,
    }
    keep(own["output_json"], result)
    if own["plot"] is not None:
        plot.batch(
            _spans(outputs),
            own["plot"],
            f"{len(outputs)} requests, {total / seconds:.4g} tokens per second",
        )
    return 0


def _spans(outputs: Sequence[RequestOutput]) -> list[plot.RequestSpan]:
    """When each request began to run, got its first token and ended, from the first arrival on."""
    timed = [(one, one.metrics) for one in outputs if one.metrics is not None]
    began = min((times.arrival_time for _, times in timed), default=0.0)
    return [
        plot.RequestSpan(times.scheduled_ts - began, times.first_token_ts - began, times.last_token_ts - began, sum(len(each.token_ids) for each in one.outputs))
        for one, times in timed
    ]  # fmt: skip


def _adapters(path: str | None, max_loras: int, count: int) -> list[LoRARequest | None]:
    """The adapter of each request; as in vLLM, names of one path that are drawn at random."""
    if path is None:
        return [None] * count
    draw = random.Random(0)
    ids = [draw.randint(1, max_loras) for _ in range(count)]
    return [LoRARequest(str(id), id, path) for id in ids]


def _prompts(llm: Any, own: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """Prompts, and the number of tokens of each answer."""
    count, output = own["num_prompts"], own["output_len"]
    if own["dataset_name"] == "random":
        return prompts(llm, count, own["input_len"]), [output or 128] * count
    cutter = datasets.LocalCutter(llm.get_tokenizer(), "the model's")
    wanted = datasets.DatasetOptions(
        own["dataset_name"], count, 0, path=own["dataset_path"], output_len=output or 128, fixed_output=output
    )  # fmt: skip
    made = asyncio.run(datasets.make(wanted, cutter))
    return [prompt.text for prompt in made], [prompt.output for prompt in made]
