"""`python -m benchmarks layouts MODEL --devices 8`: which layout of devices would be fastest, on paper.

Reads the sizes off the model itself: the part of one rank, constructed without weights. So the exchanges of a layout are those
of a run. Knows the command line and models. `costs.py` has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.layouts.costs import (
    DEVICES,
    LINKS,
    Cluster,
    DeviceSpeed,
    LayoutCosts,
    LinkSpeed,
    PartCosts,
    PlannedLoad,
    plan,
)
from quire.bench.cli import BenchArgs, BenchOption, keep, run_command
from quire.config import from_keywords
from quire.config.engine import Resolved
from quire.errors import ConfigError

OWN = {
    "devices": BenchOption(8, "devices, all of which a layout uses"),
    "devices_per_machine": BenchOption(None, "of these, in one machine; unset: all", int),
    "device_kind": BenchOption("h100", f"{', '.join(DEVICES)}; the next three replace its numbers", str),
    "device_tflops": BenchOption(None, "10^12 operations per second in 16 bits", float),
    "device_bandwidth": BenchOption(None, "GB/s of the device's memory", float),
    "device_memory": BenchOption(None, "GB of the device's memory", float),
    "link": BenchOption("nvlink", f"within a machine: {', '.join(LINKS)}, or MICROSECONDS,GB/s", str),
    "machine_link": BenchOption("infiniband", "between machines, as --link", str),
    "input_len": BenchOption(2048, "tokens per prompt"),
    "output_len": BenchOption(256, "tokens per output"),
    "max_concurrency": BenchOption(64, "requests that run at once"),
    "show": BenchOption(12, "layouts to print"),
    "output_json": BenchOption(None, "write all layouts to this file", Path),
}  # fmt: skip
ABOUT = """Compare layouts (data, pipeline, prefill context and tensor parallelism) on paper: tokens/s, latency and memory of each, the
fastest first. Numbers are upper bounds from data sheets; measure the best few. docs/parallel.md has the formulas."""


def main(argv: Sequence[str]) -> int:
    return run_command(
        "python -m benchmarks layouts", ABOUT, OWN, argv, measure, {"skip_tokenizer_init": True}
    )


def measure(args: BenchArgs) -> int:
    from quire.engine.resolve import resolve_without_weights

    own = args.own
    config = from_keywords.engine_config(args.engine, "flag")
    resolved, _ = resolve_without_weights(config)
    found = plan_layouts(resolved, own)
    fits = [one for one in found if not one.reason]
    print(f"{'layout':<24}{'tokens/s':>10}{'TTFT ms':>10}{'TPOT ms':>10}{'GB':>8}{'requests':>10}{'exchange':>10}")  # fmt: skip
    for one in fits[: own["show"]]:
        print(
            f"{one.layout!s:<24}{one.tokens_per_s:>10.0f}{one.ttft_s * 1e3:>10.1f}{one.tpot_s * 1e3:>10.2f}"
            f"{one.memory / 1e9:>8.1f}{one.requests:>10}{one.exchange:>10.0%}"
        )
    refused: dict[str, list[str]] = {}
    for one in found:
        if one.reason:
            refused.setdefault(one.reason, []).append(str(one.layout))
    for reason, which in refused.items():
        more = f" and {len(which) - 3} more" if len(which) > 3 else ""
        print(f"not: {', '.join(which[:3])}{more}: {reason}")
    keep(own["output_json"], {"layouts": [_row(one) for one in found]})
    return 0 if fits else 1


def plan_layouts(resolved: Resolved, own: Mapping[str, Any]) -> list[LayoutCosts]:
    """Every layout, the fastest first.

    Raises:
        ConfigError: an option names an unknown device or link.
        Unsupported: the model has no native class.
    """
    devices = own["devices"]
    cluster = Cluster(
        device_of(own),
        link_of("link", own["link"]),
        link_of("machine-link", own["machine_link"]),
        min(own["devices_per_machine"] or devices, devices),
    )
    numbers = own["max_concurrency"], own["input_len"], own["output_len"]
    load = PlannedLoad(*numbers, chunk=resolved.max_num_batched_tokens)
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    return plan(devices, {n: _costs_or_reason(resolved, n) for n in sizes}, cluster, load)


def device_of(own: Mapping[str, Any]) -> DeviceSpeed:
    """Raises ConfigError: the kind is unknown."""
    if (kind := own["device_kind"]) not in DEVICES:
        raise ConfigError(f"--device-kind {kind}: choose from {', '.join(DEVICES)}")
    known = DEVICES[kind]
    tflops, bandwidth, memory = (own[f"device_{x}"] for x in ("tflops", "bandwidth", "memory"))
    return DeviceSpeed(
        known.operations if tflops is None else tflops * 1e12,
        known.bandwidth if bandwidth is None else bandwidth * 1e9,
        known.memory if memory is None else memory * 1e9,
    )


def link_of(flag: str, value: str) -> LinkSpeed:
    """A link by name, or from "5,50": microseconds, and GB/s. Raises ConfigError: it is neither."""
    if value in LINKS:
        return LINKS[value]
    try:
        latency, bandwidth = (float(number) for number in value.split(","))
        if latency < 0 or bandwidth <= 0:
            raise ValueError
    except ValueError:
        names = ", ".join(LINKS)
        raise ConfigError(f"--{flag} {value}: choose from {names}, or give MICROSECONDS,GB/s") from None  # fmt: skip
    return LinkSpeed(latency * 1e-6, bandwidth * 1e9)


def _costs_or_reason(resolved: Resolved, ranks: int) -> PartCosts | str:
    """The part of one of `ranks` ranks, or why there is none."""
    from benchmarks.layouts.part_costs import part_costs
    from quire.config.model_sizes import model_size

    heads = model_size(resolved.hf_config, "num_attention_heads", 1)
    if heads % ranks:
        return f"{ranks} does not divide {heads} attention heads"
    return part_costs(resolved, ranks)


def _row(one: LayoutCosts) -> dict[str, Any]:
    return {**one._asdict(), "layout": one.layout._asdict()}
