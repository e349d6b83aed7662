"""Metrics of a load: throughput, latencies, goodput; the printout, and the JSON result that CI jobs read.

Names and definitions are the same as of `vllm bench serve` 0.32. Does not know how times were taken.

    TTFT    first token after sending         TPOT    (E2EL - TTFT) / (tokens - 1)
    ITL     between two pieces of text        E2EL    last token after sending
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from quire.bench.serve.arrivals import most_at_once
from quire.bench.serve.endpoints import RequestRecord
from quire.errors import ConfigError

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
PROMISES = ("ttft", "tpot", "e2el")  # metrics of a single request, which goodput can limit
COST_RATES = {
    "cost_per_million_output_tokens": "output_throughput",
    "cost_per_million_tokens": "total_token_throughput",
}
WIDTH = 50


@dataclass(frozen=True, slots=True)
class MetricOptions:
    """Which metrics to report."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput: dict[str, float] | None = None  # metric -> milliseconds

    @staticmethod
    def read(metrics: str, percentiles: str, goodput: Sequence[str] | None) -> MetricOptions:
        """Parse command line options. Raises ConfigError: an unknown metric, or an invalid number."""
        names = tuple(name.strip() for name in metrics.split(",") if name.strip())
        for name in names:
            if name not in METRICS:
                raise ConfigError(f"--percentile-metrics {name}: choose from {', '.join(METRICS)}")
        try:
            wanted = tuple(float(one) for one in percentiles.split(","))
        except ValueError:
            wanted = (-1.0,)
        if not all(0 <= one <= 100 for one in wanted):
            raise ConfigError(f"--metric-percentiles {percentiles}: must be numbers from 0 to 100")
        promises = {}
        for word in goodput or ():
            name, _, value = word.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = -1.0
            if name not in PROMISES or not limit >= 0:
                raise ConfigError(
                    f"--goodput {word}: must be NAME:MILLISECONDS with NAME one of {', '.join(PROMISES)}"
                )
            promises[name] = limit
        return MetricOptions(names, wanted, promises or None)


def figures(
    done: Sequence[RequestRecord], seconds: float, options: MetricOptions
) -> dict[str, Any]:
    """The measured keys of the result file. Times in milliseconds, rates per second."""
    good = [one for one in done if one.ok]
    tokens_in = sum(one.prompt_tokens for one in good)
    tokens_out = sum(one.output_tokens for one in good)
    seconds = max(seconds, 1e-9)
    spans = [(one.start, one.start + one.latency) for one in good]
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(done) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / seconds,
        "request_goodput": None,
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
        "max_output_tokens_per_s": busiest_second(good),
        "max_concurrent_requests": most_at_once(spans),
    }
    if sound := sum(one.seconds for one in good):
        result |= {"total_audio_s": sound, "rtfx": sound / seconds}
    if options.goodput is not None:
        kept = sum(_keeps(one, options.goodput) for one in good)
        result["request_goodput"] = kept / seconds
    for name in METRICS:
        result |= _summary(name, _values(name, good), options.percentiles)
    return result


def costs(result: dict[str, Any], hourly: float) -> dict[str, float | None]:
    """Cost of a million tokens at the measured rates, in the currency of `hourly`, the price of an hour."""
    found: dict[str, float | None] = {"hourly_cost": hourly}
    for name, rate in COST_RATES.items():
        found[name] = hourly / 3600 / result[rate] * 1e6 if result[rate] else None
    return found


def _values(name: str, done: Sequence[RequestRecord]) -> list[float]:
    match name:
        case "ttft":
            return [one.ttft for one in done]
        case "tpot":
            return [tpot for one in done if (tpot := one.tpot) is not None]
        case "itl":
            return [gap for one in done for gap in one.itls]
    return [one.latency for one in done]


def _summary(
    name: str, seconds: list[float], percentiles: Sequence[float]
) -> dict[str, float | None]:
    """The values are None without measurements: 0 ms would be wrong."""
    values = 1e3 * numpy.asarray(seconds or [math.nan])
    found = {
        f"mean_{name}_ms": values.mean(),
        f"median_{name}_ms": numpy.median(values),
        f"std_{name}_ms": values.std(),
    }
    for one in percentiles:
        found[f"p{_short(one)}_{name}_ms"] = numpy.percentile(values, one)
    return {key: float(value) if seconds else None for key, value in found.items()}


def _short(percentile: float) -> str:
    return f"{percentile:g}"


def _keeps(done: RequestRecord, promises: dict[str, float]) -> bool:
    found = {"ttft": done.ttft, "tpot": done.tpot or 0.0, "e2el": done.latency}
    return all(1e3 * found[name] <= limit for name, limit in promises.items())


def _peak(result: dict[str, Any]) -> float | None:
    """None: the run was too short for whole seconds, so that the busiest one is below the mean."""
    peak = float(result["max_output_tokens_per_s"])
    return peak if peak >= result["output_throughput"] else None


def busiest_second(done: Sequence[RequestRecord]) -> float:
    """The most tokens within one second since the start. A request's tokens are spread evenly over its pieces."""
    if not done:
        return 0.0
    start = min(one.start for one in done)
    weights: dict[int, float] = {}
    for one in done:
        when = one.start + one.ttft
        each = one.output_tokens / (len(one.itls) + 1)
        for gap in (0.0, *one.itls):
            when += gap
            second = math.floor(when - start)
            weights[second] = weights.get(second, 0.0) + each
    return max(weights.values())


def printout(result: dict[str, Any], options: MetricOptions, most: int | None, rate: float) -> str:
    """The table to print at the end."""
    rows: dict[str, float | None] = {
        "Successful requests:": result["completed"],
        "Failed requests:": result["failed"],
        "Maximum request concurrency:": most,
        "Request rate configured (RPS):": rate if rate != math.inf else None,
        "Benchmark duration (s):": result["duration"],
        "Total input tokens:": result["total_input_tokens"],
        "Total generated tokens:": result["total_output_tokens"],
        "Request throughput (req/s):": result["request_throughput"],
        "Request goodput (req/s):": result["request_goodput"],
        "Output token throughput (tok/s):": result["output_throughput"],
        "Peak output token throughput (tok/s):": _peak(result),
        "Peak concurrent requests:": float(result["max_concurrent_requests"]),
        "Total token throughput (tok/s):": result["total_token_throughput"],
        "Total audio (s):": result.get("total_audio_s"),
        "Inverse real-time factor (RTFx):": result.get("rtfx"),
        "Cost per million output tokens:": result.get("cost_per_million_output_tokens"),
        "Cost per million tokens:": result.get("cost_per_million_tokens"),
    }
    lines = [_title("Serving Benchmark Result", "=")]
    lines += [_line(words, value) for words, value in rows.items() if value is not None]
    for name in options.metrics:
        short, long = METRICS[name]
        lines += [
            _title(long, "-"),
            _line(f"Mean {short} (ms):", result[f"mean_{name}_ms"]),
            _line(f"Median {short} (ms):", result[f"median_{name}_ms"]),
        ]
        lines += [
            _line(f"P{_short(one)} {short} (ms):", result[f"p{_short(one)}_{name}_ms"])
            for one in options.percentiles
        ]
    return "\n".join([*lines, "=" * WIDTH])


def _title(words: str, around: str) -> str:
    pad = f" {words} " if around == "=" else words
    return pad.center(WIDTH, around)


def _line(words: str, value: float | None) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{words:<40} {text:<10}"


def failures(done: Sequence[RequestRecord]) -> str:
    """The most frequent errors, each with its count."""
    counts = Counter(one.error for one in done if not one.ok)
    return "\n".join(f"failed {count} times: {why}" for why, count in counts.most_common(5))


def details(done: Sequence[RequestRecord], prompts: Sequence[int]) -> dict[str, Any]:
    """The keys that --save-detailed adds: values by request, times in seconds."""
    return {
        "input_lens": [
            one.prompt_tokens if one.ok else length
            for one, length in zip(done, prompts, strict=True)
        ],
        "output_lens": [one.output_tokens for one in done],
        "start_times": [one.start for one in done],
        "ttfts": [one.ttft for one in done],
        "itls": [one.itls for one in done],
        "generated_texts": [one.text for one in done],
        "errors": [one.error for one in done],
    }
