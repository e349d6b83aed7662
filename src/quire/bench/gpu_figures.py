"""How fast is a GPU's path? Kernels, steps and serving at real shapes, with the floor beside each.

Knows what bytes and operations each must cost at least; the card's own ceilings come from `gpu.machine`. Does not know
whether anything is right (`gpu_checks.py`).
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quire.bench.gpu_checks import on
from quire.bench.gpu_shapes import client_of, filled_cache, kv_of, weights_of, write_config

if TYPE_CHECKING:
    from quire.bench.gpu import Run


def timed(run: Run, call: Callable[[], Any], least: int = 10) -> float:
    """Median seconds of a call on the device, after a warm-up."""
    if run.device != "cuda":
        call()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(least + 1)]
    for mark in marks:
        mark.record()
        if mark is not marks[-1]:
            call()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


def _line(run: Run, seconds: float, num_bytes: float = 0, flops: float = 0) -> dict[str, Any]:
    """With the floor: the larger of the times that bytes and operations take at the measured ceilings."""
    floor = max(
        num_bytes / run.ceilings.get("bytes", 1e30), flops / run.ceilings.get("flops", 1e30)
    )
    return {
        "microseconds": round(seconds * 1e6, 1),
        "floor": round(floor * 1e6, 1),
        "of the floor": round(floor / seconds, 3),
    }


def kernels(run: Run) -> dict[str, Any]:
    """Attention at the 8B shape, and the kernels that only move bytes."""
    found: dict[str, Any] = {}
    dtype = torch.float32 if run.small else torch.bfloat16
    for rows, length in (
        ((2, 40),) if run.small else ((1, 1024), (1, 32768), (64, 2048), (256, 1024))
    ):
        found[f"decode of {rows} rows of {length}"] = _attention(run, [length] * rows, 1, dtype)
    for new in (24,) if run.small else (2048, 8192):
        found[f"prefill of {new}"] = _attention(run, [new], new, dtype)
    found |= _movers(run, dtype)
    return found


def _attention(run: Run, lengths: list[int], new: int, dtype: torch.dtype) -> dict[str, Any]:
    from quire.ops.triton.attention import Scores, attend, sizes_for

    heads, kv_heads = (4, 2) if run.small else (32, 8)
    cache, step, q = filled_cache(lengths, new, dtype, run.device, heads, kv_heads)
    sizes = sizes_for(heads // kv_heads, 128, dtype.itemsize)
    tokens_each = sizes.long // (heads // kv_heads)
    if new > sizes.short // (heads // kv_heads):
        work = [(row, at) for row in range(len(lengths)) for at in range(0, new, tokens_each)]
        step.long_W2 = torch.tensor(work, dtype=torch.int32, device=run.device)
        step.num_short = 0
    seconds = timed(run, lambda: attend(q, cache, step, Scores(0.09), sizes))
    num_bytes = sum(lengths) * 2 * kv_heads * 128 * dtype.itemsize + 2 * q.numel() * dtype.itemsize
    pairs = sum(new * (n - new) + new * (new + 1) / 2 for n in lengths)
    return _line(run, seconds, num_bytes, 4 * pairs * heads * 128)


def _movers(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes read once and written once are their floor."""
    from quire.ops.triton import rows, sampling

    tokens, size = (8, 256) if run.small else (8192, 4096)
    x = torch.randn(tokens, size, device=run.device).to(dtype)
    other, weight = torch.randn_like(x), torch.ones(size, device=run.device, dtype=dtype)
    one = x.numel() * dtype.itemsize
    few, vocab = (2, 3000) if run.small else (256, 151_936)
    logits = torch.randn(few, vocab, device=run.device)
    keys = torch.randint(0, 1 << 30, (2, few), dtype=torch.int32, device=run.device)
    ks = torch.full((few,), 50, dtype=torch.int64, device=run.device)
    ps = torch.full((few,), 0.9, dtype=torch.float64, device=run.device)
    none = torch.full_like(ps, -torch.inf)
    calls: dict[str, tuple[Callable[[], Any], float]] = {
        "add_rms_norm": (lambda: rows.add_rms_norm(x, other, weight, 1e-5), 4 * one),
        "silu_and_mul": (lambda: rows.silu_and_mul(x), 1.5 * one),
        "draw": (lambda: sampling.draw(logits, keys), 4 * logits.numel()),
        "threshold of top-k and top-p": (lambda: sampling.threshold(logits, ks, ps, none), 4 * logits.numel()),
        "the same by a sort": (lambda: logits.sort(dim=-1), 4 * logits.numel()),
    }  # fmt: skip
    return {name: _line(run, timed(run, call), cost) for name, (call, cost) in calls.items()}


# ------------------------------------------------------------------------------------ whole steps


def steps(run: Run) -> dict[str, Any]:
    """Of the 8B shape: time to Ready, a prefill of 8,192 tokens, decoding 1, 64 and 256 rows; the host's share."""
    name = "tiny" if run.small else "llama-8b"
    prompt, sizes, count = (20, (1, 3), 6) if run.small else (1024, (1, 64, 256), 96)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, on(run.device):
        write_config(Path(folder), name)
        began = time.perf_counter()
        options = {"max_model_len": 256 if run.small else 16384, "max_num_seqs": max(sizes)}
        with client_of(folder, **options) as client:
            waits = _watched(client)
            found["seconds to Ready"] = round(time.perf_counter() - began, 2)
            long = 60 if run.small else 8192
            _many(client, [long], 1, "warm")
            seconds = _many(client, [long], 1, "prefill")[0]
            found[f"prefill of {long}"] = _line(run, seconds, flops=weights_of(name) * long)
            for rows in sizes:
                if run.left < 60:
                    break
                _many(client, [prompt] * rows, count, f"warm-{rows}")  # graphs are recorded here
                waits.clear()
                _, gaps = _many(client, [prompt] * rows, count, f"decode-{rows}")
                seconds, waited = statistics.median(gaps), statistics.median(waits[-len(gaps) :])
                cost = weights_of(name) + rows * (prompt + count / 2) * kv_of(name)
                found[f"decode of {rows} rows"] = {
                    **_line(run, seconds, cost), "tokens a second": round(rows / seconds),
                    "microseconds of the host": round(1e6 * (seconds - waited), 1),
                }  # fmt: skip
    return found


class _Watched:
    """A pending step that notes how long its result was waited for: what is left of a step is the host's."""

    def __init__(self, pending: Any, waits: list[float]):
        self.pending, self.waits = pending, waits

    def result(self) -> Any:
        began = time.perf_counter()
        try:
            return self.pending.result()
        finally:
            self.waits.append(time.perf_counter() - began)


def _watched(client: Any) -> list[float]:
    """Seconds that the engine waits for each step from now on."""
    waits: list[float] = []
    executor = client.core.executor
    launch = executor.launch
    executor.launch = lambda plan: _Watched(launch(plan), waits)
    return waits


def _many(client: Any, lengths: list[int], count: int, name: str) -> tuple[float, list[float]]:
    """(seconds in all, seconds between outputs once every prompt is computed) of greedy requests side by side."""
    from quire.protocol.params import SamplingParams
    from quire.protocol.request import EngineRequest

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


# ------------------------------------------------------------------------------------ serving


def serving(run: Run) -> dict[str, Any]:
    """Qwen3-0.6B's shape: 256 requests of 100 to 1024 tokens in and out, tokens a second; then a mixed load at a rate."""
    from quire.protocol.params import SamplingParams
    from quire.protocol.request import EngineRequest

    rng = random.Random(0)
    requests, low, high = (4, 4, 20) if run.small else (256, 100, 1024)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, on(run.device):
        write_config(Path(folder), "tiny" if run.small else "qwen3-0.6b")
        options = {"max_model_len": 256 if run.small else 4096, "max_num_seqs": min(requests, 256)}
        with client_of(folder, **options) as client:
            _many(client, [low] * requests, 8, "warm")
            inputs = [rng.randint(low, high) for _ in range(requests)]
            outputs = [rng.randint(low, high) for _ in range(requests)]
            began = time.perf_counter()
            for i, (n, count) in enumerate(zip(inputs, outputs, strict=True)):
                params = SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True, seed=i)
                tokens = [rng.randrange(3, 200) for _ in range(n)]
                client.submit(EngineRequest(str(i), tokens, params))
            left = requests
            while left:
                left -= sum(output.finish is not None for output in client.outputs())
            seconds = time.perf_counter() - began
            found["all at once"] = {
                "requests": requests, "output tokens": sum(outputs), "seconds": round(seconds, 2),
                "output tokens a second": round(sum(outputs) / seconds),
            }  # fmt: skip
            if run.left > 60:
                found["at a rate"] = _at_a_rate(run, client, rng)
    return found


def _at_a_rate(run: Run, client: Any, rng: random.Random) -> dict[str, Any]:
    """Requests of 1,024 tokens in and 256 out that come evenly; seconds to the first token and between tokens."""
    from quire.protocol.params import SamplingParams
    from quire.protocol.request import EngineRequest

    requests, prompt, count, rate = (3, 10, 4, 50.0) if run.small else (200, 1024, 256, 10.0)
    params = SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True, seed=1)
    began = time.perf_counter()
    arrived: dict[str, float] = {}
    last: dict[str, float] = {}
    first: list[float] = []
    gaps: list[float] = []
    left = requests
    while left:
        now = time.perf_counter()
        while len(arrived) < requests and now >= began + len(arrived) / rate:
            name = f"rate-{len(arrived)}"
            arrived[name] = now
            client.submit(EngineRequest(name, [rng.randrange(3, 200) for _ in range(prompt)], params))  # fmt: skip
        if len(arrived) == len([n for n in last if last[n] < 0]):
            continue  # nobody is running, and the next has not come
        for output in client.outputs():
            now = time.perf_counter()
            if output.tokens:
                before = last.get(output.id)
                (first if before is None else gaps).append(now - (before or arrived[output.id]))
                last[output.id] = now
            if output.finish is not None:
                left, last[output.id] = left - 1, -1.0
    return {"TTFT": _spread(first), "ITL": _spread(gaps), "requests a second": rate}


def _spread(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {
        f"p{p} ms": round(1e3 * values[min(len(values) - 1, len(values) * p // 100)], 2)
        for p in (50, 99)
    }
