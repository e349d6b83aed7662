"""Speed of a whole engine on a GPU: start-up, prefill, decode and serving loads, with their floors.

Knows engines with random weights, and the lower bounds of their steps. Does not know kernels (`kernels.py`).
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.gpu.checks import on
from benchmarks.gpu.fixtures import (
    client_of,
    kv_of,
    lengths_of_load,
    prefill_flops,
    weights_of,
    write_config,
)
from benchmarks.gpu.kernels import line

if TYPE_CHECKING:
    from benchmarks.gpu.run import Found, Run


def steps(run: Run, found: Found) -> None:
    """The 8B shape in bf16."""
    _steps(run, found, {}, 2.0, "flops")


def steps_fp8(run: Run, found: Found) -> None:
    """The same in fp8, quantized at load."""
    if run.device != "cuda":
        found["skipped"] = "fp8 is int8 on a CPU"
        return
    _steps(run, found, {"quantization": "fp8"}, 1.0, "fp8 flops")


def _steps(run: Run, found: Found, options: dict[str, Any], itemsize: float, rate: str) -> None:
    """Time to Ready, a prefill of 8,192 tokens, decode of 1, 64 and 256 rows, host overhead, a mixed load."""
    name = "tiny" if run.small else "llama-8b"
    prompt, sizes, count = (20, (1, 3), 6) if run.small else (1024, (1, 64, 256), 64)
    weights = weights_of(name, itemsize)
    with tempfile.TemporaryDirectory() as folder, on(run.device):
        write_config(Path(folder), name)
        began = time.perf_counter()
        length = 256 if run.small else 16384
        with client_of(folder, max_model_len=length, max_num_seqs=max(sizes), **options) as client:
            found["seconds to Ready"] = round(time.perf_counter() - began, 2)
            found["seconds to Ready from the process's start"] = round(time.time() - run.began, 2)
            found["by stage"] = {name: round(took, 2) for name, took in client.ready.startup}
            waits = _watched(client)
            long = 60 if run.small else 8192
            many(client, [long], 1, "warm")
            times = [many(client, [long], 1, f"prefill-{i}")[0] for i in range(3)]
            flops = prefill_flops(name, long)
            found[f"prefill of {long}"] = line(run, statistics.median(times), flops=flops, kind=rate)  # fmt: skip
            for rows in sizes:
                if run.left < 12:
                    return
                record(client, [rows])
                waits.clear()
                _, gaps = many(client, [prompt] * rows, count, f"decode-{rows}")
                seconds, waited = statistics.median(gaps), statistics.median(waits[-len(gaps) :])
                cost = weights + rows * (prompt + count / 2) * kv_of(name)
                found[f"decode of {rows} rows"] = {
                    **line(run, seconds, cost), "tokens a second": round(rows / seconds),
                    "microseconds of the host": round(1e6 * (seconds - waited), 1), "recorded": _recorded(client),
                }  # fmt: skip
            if run.device == "cuda" and run.left > 15:
                found[f"share of {max(sizes)} rows' time that the device is idle"] = _idle(client, max(sizes))  # fmt: skip
            if run.left > 40:
                record(client, [8, 16, 32, 64])
                found["mixed load"] = _at_a_rate(run, client, Cost(name, itemsize, rate))


class _Watched:
    """A pending step that records how long the engine waits for its result: the rest of a step is host time."""

    def __init__(self, pending: Any, waits: list[float]):
        self.pending, self.waits = pending, waits

    def result(self) -> Any:
        began = time.perf_counter()
        try:
            return self.pending.result()
        finally:
            self.waits.append(time.perf_counter() - began)


def _watched(client: Any) -> list[float]:
    """A list that gets the engine's wait in seconds for each step from now on."""
    waits: list[float] = []
    executor = client.core.executor
    launch = executor.launch
    executor.launch = lambda plan: _Watched(launch(plan), waits)
    return waits


def record(client: Any, sizes: list[int]) -> None:
    """Capture graphs for these numbers of rows now, without the capture budget; skip those that cannot be captured."""
    source = _source(client)
    if (budget := getattr(source, "budget", None)) is None:
        return
    share, budget.share, budget.free_at = budget.share, 1.0, 0.0
    for size in sizes:
        many(client, [4] * size, 4, f"record-{size}")
    budget.share = share


def _recorded(client: Any) -> list[int]:
    return sorted(key.size for key in getattr(_source(client), "captured", {}))


def _source(client: Any) -> Any:
    return client.core.executor.worker.model_input


def many(client: Any, lengths: list[int], count: int, name: str) -> tuple[float, list[float]]:
    """Run greedy requests at once: (total seconds, seconds between outputs after every prompt is computed)."""
    from quire.protocol.request import EngineRequest
    from quire.protocol.sampling_params import SamplingParams

    rng = random.Random(name)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, seed=0)
    began = last = time.perf_counter()
    for i, n in enumerate(lengths):
        tokens = [rng.randrange(3, 200) for _ in range(n)]
        client.submit(EngineRequest(f"{name}-{i}", tokens, params))
    left, started, gaps = len(lengths), set(), []
    while left:
        for output in client.outputs():
            if output.finish == "error":
                raise RuntimeError(output.error)
            started.add(output.id)
            left -= output.finish is not None
        now = time.perf_counter()
        if len(started) == len(lengths):
            gaps.append(now - last)
        last = now
    return time.perf_counter() - began, gaps[1:] or [0.0]


def _idle(client: Any, rows: int) -> Any:
    """The share of decode time in which the device runs nothing, from the profiler; an error message if that fails."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            many(client, [64] * rows, 24, "idle")
            torch.cuda.synchronize()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in seen.events()
            if event.device_type.name == "CUDA"
        )
        return _share_idle(spans)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]


def _share_idle(spans: list[tuple[float, float]]) -> float:
    """The idle share of the second half of the spans; the first half has the prompts."""
    spans = spans[len(spans) // 2 :]
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return round(1 - busy / (end - spans[0][0]), 4)


# ------------------------------------------------------------------------------------ loads


def serving(run: Run, found: Found) -> None:
    """Tokens/s of Qwen3-0.6B's shape with 256 requests of 100 to 1024 tokens in and out."""
    inputs, outputs = lengths_of_load(run.small)
    with tempfile.TemporaryDirectory() as folder, on(run.device):
        write_config(Path(folder), "tiny" if run.small else "qwen3-0.6b")
        options = {"max_model_len": 256 if run.small else 4096, "max_num_seqs": len(inputs)}
        with client_of(folder, **options) as client:
            many(client, [100] * len(inputs), 8, "warm")
            began = time.perf_counter()
            record(client, getattr(_source(client), "sizes", []))
            found["seconds to record every size"] = round(time.perf_counter() - began, 1)
            seconds = all_at_once(client, inputs, outputs)
            found["requests"], found["output tokens"] = len(inputs), sum(outputs)
            found["seconds of them"] = round(seconds, 2)
            found["output tokens a second"] = round(sum(outputs) / seconds)
            found["recorded"] = _recorded(client)


def all_at_once(client: Any, inputs: list[int], outputs: list[int]) -> float:
    """Run all requests at once; return the seconds."""
    from quire.protocol.request import EngineRequest
    from quire.protocol.sampling_params import SamplingParams

    rng = random.Random(0)
    began = time.perf_counter()
    for i, (n, count) in enumerate(zip(inputs, outputs, strict=True)):
        params = SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True, seed=i)
        tokens = [rng.randrange(3, 200) for _ in range(n)]
        client.submit(EngineRequest(f"load-{i}", tokens, params))
    left = len(inputs)
    while left:
        left -= _ended(client.outputs())
    return time.perf_counter() - began


def _ended(outputs: list[Any]) -> int:
    for output in outputs:
        if output.finish == "error":
            raise RuntimeError(output.error)
    return sum(output.finish is not None for output in outputs)


class Cost(NamedTuple):
    """The cost model of a step: the model's shape, bytes of a weight, and the ceiling of its matrix products."""

    name: str
    itemsize: float
    kind: str


def floors_of_load(run: Run, cost: Cost, rate: float, prompt: int, count: int) -> dict[str, float]:
    """Lower bounds of TTFT and ITL in milliseconds, for requests at a constant rate.

    A step reads the weights and the KV cache of its rows; a step with a prompt takes at least the time of that prompt
    alone. The number of rows is the number of arrivals while one request runs.
    """
    ceiling, flops = run.ceilings.get("bytes", 1e30), run.ceilings.get(cost.kind, 1e30)
    reading = weights_of(cost.name, cost.itemsize) / ceiling
    alone = max(reading, prefill_flops(cost.name, prompt) / flops)
    each = (prompt + count / 2) * kv_of(cost.name) / ceiling  # of a row
    free = 1 - rate * (alone - reading) - rate * count * each
    if free <= 0:
        return {}  # the load exceeds the capacity
    rows = rate * count * reading / free
    found = {"TTFT": alone, "ITL p50": reading + rows * each, "ITL p99": alone + rows * each}
    return {
        **{name: round(1e3 * seconds, 2) for name, seconds in found.items()},
        "rows": round(rows, 1),
    }


def _at_a_rate(run: Run, client: Any, cost: Cost) -> dict[str, Any]:
    """TTFT and ITL of requests at a constant rate, with 1,024 tokens in and 256 out."""
    from quire.protocol.request import EngineRequest
    from quire.protocol.sampling_params import SamplingParams

    rng = random.Random(1)
    requests, prompt, count, rate = (3, 10, 4, 50.0) if run.small else (200, 1024, 256, 10.0)
    params = SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True, seed=1)
    texts = [[rng.randrange(3, 200) for _ in range(prompt)] for _ in range(requests)]
    began = time.perf_counter()
    arrived: dict[str, float] = {}
    last: dict[str, float] = {}
    first: list[float] = []
    gaps: list[float] = []
    running = 0
    while running or len(arrived) < requests:
        now = time.perf_counter()
        while len(arrived) < requests and now >= began + len(arrived) / rate:
            name = f"rate-{len(arrived)}"
            arrived[name] = (
                began + len(arrived) / rate
            )  # when it was due: a step may have delayed the submit
            client.submit(EngineRequest(name, texts[len(arrived) - 1], params))
            running += 1
        if not running:
            continue  # the next request is not due
        outputs = client.outputs()
        now = time.perf_counter()
        for output in outputs:
            if output.tokens:
                before = last.get(output.id)
                if before is None:
                    first.append(now - arrived[output.id])
                else:
                    gaps.append(now - before)
                last[output.id] = now
        running -= _ended(outputs)
    took = time.perf_counter() - began
    return {
        "TTFT": _spread(first), "ITL": _spread(gaps), "floors, ms": floors_of_load(run, cost, rate, prompt, count),
        "requests a second": rate,
        "output tokens a second": round(requests * count / took),
    }  # fmt: skip


def _spread(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {
        f"p{p} ms": round(1e3 * values[min(len(values) - 1, len(values) * p // 100)], 2)
        for p in (50, 99)
    }
