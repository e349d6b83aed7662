"""Pictures of benchmarks, for slides: throughput against latency, and one load in time. Each is a PNG and an SVG.

Knows measured numbers and matplotlib (the extra `plot`), which is imported only to draw. Does not know how numbers are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy

from quire.errors import ConfigError, QuireError

COLOURS = ("#3f5de0", "#e07b1a", "#1f9d6b", "#b3409b", "#8a6d1f", "#5a6475")
"""Distinct without colour vision as well: lines also differ in their marks."""
MARKS = "os^Dv*"
LABEL_PLACES: tuple[dict[str, Any], ...] = (
    {"xytext": (6, -12), "ha": "left"},
    {"xytext": (-6, 6), "ha": "right"},
)
"""Of the labels of a line's points: neighbouring lines have theirs on opposite sides."""
SIZE_INCHES, DPI = (11, 4.6), 200
INK, FAINT = "#1c2230", "#d7dbe3"
HELP = "draw a picture: NAME.png and NAME.svg (needs matplotlib, the extra `plot`)"


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Times of one request, in seconds from the start of the benchmark."""

    sent: float
    first: float
    end: float
    tokens: int


def check(path: Path | None) -> None:
    """Before anything is measured: can a picture be drawn there?

    Raises:
        ConfigError: matplotlib is missing, or the folder does not exist.
    """
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib (the extra `plot`)")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.parent} does not exist")


def files(path: Path) -> tuple[Path, Path]:
    """`NAME`, `NAME.png` and `NAME.svg` all mean both files."""
    stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    return stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")


def sweep(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Output tokens per second of all clients against what one user sees; a line for each server, a point for each load.

    Args:
        results: results of `bench serve`, each with `serve` and `bench`, the flags of the server and of the load. Runs of one pair
            become their median.
    """
    figure, panels = _panels("Throughput against latency")
    axes = (("median_ttft_ms", "Time to first token, median (ms)"), ("median_tpot_ms", "Time per output token, median (ms)"))  # fmt: skip
    servers = list(dict.fromkeys(_words(one["serve"]) for one in results))
    flag = _only_flag(results)
    for panel, (name, label) in zip(panels, axes, strict=True):
        for place, server in enumerate(servers):
            points = _points([one for one in results if _words(one["serve"]) == server], name)
            x, y, loads = [list(column) for column in zip(*points, strict=True)] or ([], [], [])
            colour, mark = COLOURS[place % len(COLOURS)], MARKS[place % len(MARKS)]
            panel.plot(x, y, color=colour, marker=mark, label=server or "server")
            side = LABEL_PLACES[place % len(LABEL_PLACES)]
            for index, load in enumerate(loads):
                panel.annotate(load.removeprefix(f"{flag} "), (x[index], y[index]), textcoords="offset points", fontsize=9, color=colour, **side)  # fmt: skip
        panel.set(xlabel=label, ylabel="Output tokens per second, all clients", ylim=(0, None))
        _milliseconds(panel)
    if len(servers) > 1:
        panels[0].legend(frameon=False, loc="lower right")
    if flag:
        panels[1].set_title(f"at each point: {flag}", loc="right", fontsize=9, color=INK)
    _write(figure, path)


def _only_flag(results: Sequence[Mapping[str, Any]]) -> str:
    """The flag of the loads in words, where each load has this one flag; "": the loads have other flags too."""
    flags = {tuple(one["bench"]) for one in results}
    names = flags.pop() if len(flags) == 1 else ()
    return names[0].replace("_", " ") if len(names) == 1 and names[0] != "_benchmark_name" else ""


def _points(results: Sequence[Mapping[str, Any]], latency: str) -> list[tuple[float, float, str]]:
    """(latency in ms, tokens per second, load) of each load, in the order of the file."""
    found = []
    for load in dict.fromkeys(_words(one["bench"]) for one in results):
        runs = [one for one in results if _words(one["bench"]) == load and one.get(latency)]
        if runs:
            speed = median(one["output_throughput"] for one in runs)
            found.append((median(one[latency] for one in runs), speed, load))
    return found


def _words(flags: Mapping[str, Any]) -> str:
    """Flags in a legend: a given name, else `max concurrency 4`, and so on."""
    if "_benchmark_name" in flags:
        return str(flags["_benchmark_name"])
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in flags.items())


def load(spans: Sequence[RequestSpan], path: Path, title: str) -> None:
    """One load: how many requests were within which latency, and the tokens of each second."""
    figure, panels = _panels(title)
    latencies = {
        "time to first token": [(one.first - one.sent) * 1000 for one in spans],
        "time per output token": [(one.end - one.first) / (one.tokens - 1) * 1000 for one in spans if one.tokens > 1],
    }  # fmt: skip
    for place, (name, values) in enumerate(latencies.items()):
        if values:
            middle, late = numpy.percentile(values, (50, 99))
            label = f"{name}: median {middle:.3g} ms, p99 {late:.3g} ms"
            shares = numpy.arange(1, len(values) + 1) / len(values) * 100
            panels[0].step(sorted(values), shares, where="post", color=COLOURS[place], label=label)
    panels[0].set(xlabel="Milliseconds", ylabel="Requests within this time (%)", ylim=(0, 101))
    _milliseconds(panels[0])
    panels[0].legend(frameon=False, loc="lower right", fontsize=9)
    _rate(panels[1], spans)
    _write(figure, path)


def batch(spans: Sequence[RequestSpan], path: Path, title: str) -> None:
    """One batch: how many requests run and are done, and the tokens of each second."""
    figure, panels = _panels(title)
    end = max((one.end for one in spans), default=0.0)
    times = numpy.linspace(0, end, 300)
    starts, ends = (numpy.sort([getattr(one, name) for one in spans]) for name in ("sent", "end"))
    done = numpy.searchsorted(ends, times, side="right")
    panels[0].plot(times, done, color=COLOURS[0], label="finished")
    running = numpy.searchsorted(starts, times, side="right") - done
    panels[0].plot(times, running, color=COLOURS[1], label="running")
    panels[0].set(xlabel="Seconds", ylabel="Requests", ylim=(0, None))
    panels[0].legend(frameon=False)
    _rate(panels[1], spans)
    _write(figure, path)


def _milliseconds(panel: Any) -> None:
    """A logarithmic axis with plain numbers, and room for the last label."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    panel.set_xscale("log")
    panel.margins(x=0.12)
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.xaxis.set_minor_formatter(NullFormatter())


def _rate(panel: Any, spans: Sequence[RequestSpan]) -> None:
    """Output tokens per second over time; the tokens of a request are spread evenly from its first to its last."""
    end = max((one.end for one in spans), default=0.0) or 1.0
    edges = numpy.linspace(0, end, 61)
    width, tokens = edges[1], numpy.zeros(60)
    for one in spans:
        moments = numpy.linspace(one.first, one.end, max(one.tokens, 1))
        tokens += numpy.histogram(numpy.minimum(moments, end), edges)[0]
    panel.stairs(tokens / width, edges, color=COLOURS[0], fill=True, alpha=0.85)
    mean = sum(one.tokens for one in spans) / end
    panel.axhline(mean, color=INK, linewidth=1, linestyle="--")
    panel.annotate(f"mean {mean:.4g}", (0, mean), xytext=(4, 4), textcoords="offset points", fontsize=9, color=INK)  # fmt: skip
    panel.set(xlabel="Seconds", ylabel="Output tokens per second", xlim=(0, end), ylim=(0, None))


def _panels(title: str) -> tuple[Any, Sequence[Any]]:
    """A figure with two panels, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    panels = figure.subplots(1, 2)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color=FAINT, linewidth=0.7)
        panel.set_axisbelow(True)
    return figure, panels


def _write(figure: Any, path: Path) -> None:
    """Raises QuireError: a file cannot be written."""
    from matplotlib import rc_context

    made = files(path)
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "quire"}):
            figure.savefig(made[0], dpi=DPI)
            figure.savefig(made[1], metadata={"Date": None})
    except OSError as why:
        raise QuireError(f"--plot {path}: {why}") from why
    print(f"plot in {made[0]} and {made[1]}")
