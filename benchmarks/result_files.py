"""Result files of benchmarks, their Markdown pages, and the comparison with the last result.

Knows what was measured. Does not know how.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shapes import Workload


@dataclass(slots=True)
class Measured:
    """All rounds of one workload."""

    workload: Workload
    seconds: dict[str, list[float]]  # by engine
    floor: float  # seconds, at the probed speed of the machine
    predicted: float  # seconds, computed before the measurement
    agreement: float | None  # share of tokens equal to the peer's

    def row(self) -> dict[str, Any]:
        medians = {name: median(all) for name, all in self.seconds.items()}
        tokens = self.workload.rows * self.workload.output
        ours, peer = medians["quire"], medians.get("transformers")
        return {
            "workload": self.workload.name,
            "requests": self.workload.rows,
            "prompt_tokens": self.workload.prompt,
            "output_tokens": self.workload.output,
            "seconds": {name: [round(s, 4) for s in all] for name, all in self.seconds.items()},
            "median_s": {name: round(s, 4) for name, s in medians.items()},
            "output_tokens_per_s": {name: round(tokens / s, 2) for name, s in medians.items()},
            "speed_of_peer": None if peer is None else round(peer / ours, 3),
            "predicted_s": round(self.predicted, 4),
            "floor_s": round(self.floor, 4),
            "share_of_floor": round(self.floor / ours, 3),
            "agreement": None if self.agreement is None else round(self.agreement, 4),
        }


def table(result: dict[str, Any], last: dict[str, Any] | None) -> str:
    """A Markdown table. Seconds are medians over the rounds; lower is better."""
    before = {
        row["workload"]: row["median_s"]["quire"] for row in (last or {}).get("workloads", [])
    }
    lines = [
        "| workload | quire, s | tokens/s | Transformers, s | quire is | predicted, s | floor, s | of floor | equal tokens | last, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["workloads"]:
        peer, speed = row["median_s"].get("transformers"), row["speed_of_peer"]
        cells = [
            row["workload"],
            f"{row['median_s']['quire']:.3g}",
            f"{row['output_tokens_per_s']['quire']:.3g}",
            "" if peer is None else f"{peer:.3g}",
            "" if speed is None else f"{speed:.2f}x",
            f"{row['predicted_s']:.3g}",
            f"{row['floor_s']:.3g}",
            f"{row['share_of_floor']:.0%}",
            "" if row["agreement"] is None else f"{row['agreement']:.1%}",
            f"{before[row['workload']]:.3g}" if row["workload"] in before else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(result: dict[str, Any], last: dict[str, Any] | None) -> str:
    """The whole Markdown page of a result."""
    machine, probes = result["machine"], result["probes"]
    speeds = [f"{p['bytes_per_s'] / 1e9:.1f}" for p in probes]
    flops = [f"{p['flops_per_s'] / 1e12:.2f}" for p in probes]
    lines = [
        f"# {result['shape']}, {result['dtype']}, {result['date']}",
        "",
        f"Command: `{result['command']}`, commit {result['commit']}.",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['capability']},"
        f" kernels {machine['kernels']}, {machine['threads']} threads, load {machine['load']:.1f} at the start; {machine['system']}.",
        f"Versions: Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}.",
        f"Probes around the rounds: read {', '.join(speeds)} GB/s; matrix product {', '.join(flops)} TFLOP/s.",
        "",
        f"Medians of {result['rounds']} interleaved rounds, greedy, random weights.",
        "The floor is the time at the probed speeds with nothing else to do; the prediction was computed beforehand from"
        " the same probes and the shares in `benchmarks/roofline.py`.",
        "",
        table(result, last),
        "",
        "Cost of a scheduler step, all rows decoding:",
        "",
        "| rows | depth | plan, ms | commit, ms | sum, ms | p99, ms | goal, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for cost in result["steps"]:
        goal = "" if cost["goal"] is None else f"{cost['goal']:.1f}"
        lines.append(
            f"| {cost['rows']} | {cost['depth']} | {cost['plan']:.3f} | {cost['commit']:.3f} |"
            f" {cost['total']:.3f} | {cost['worst']:.3f} | {goal} |"
        )
    return "\n".join(lines) + "\n"


def last_like(result: dict[str, Any], folder: Path, machine: str) -> dict[str, Any] | None:
    """The newest kept result of the same shape, dtype and kind of machine."""
    for path in sorted(folder.glob(f"*-{machine}*.json"), key=_order, reverse=True):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if all(found.get(key) == result[key] for key in ("shape", "dtype")):
            return found
    return None


def _order(path: Path) -> tuple[str, int]:
    """Date and number of a result file: see `free_name`."""
    number = re.search(r"-(\d+)$", path.stem)
    return path.stem[: len("2000-01-01")], int(number[1]) if number else 1


def free_name(folder: Path, stem: str) -> Path:
    """folder/stem.json, or stem-2.json and so on, so that no result is overwritten."""
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path


def commit() -> str:
    """The commit of the source, with a + if the tree is dirty; "unknown" outside a repository."""
    here = Path(__file__).parent
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=here, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.stdout.strip()


def report(folder: Path | None, kind: str, title: str, result: dict[str, Any], table: str) -> None:
    """Print the table; keep the result if a folder is given."""
    print(table)
    if folder is not None:
        print(f"kept in {keep(folder, kind, title, result, table)}")


def keep(folder: Path, kind: str, title: str, result: dict[str, Any], table: str) -> Path:
    """Write folder/DATE-KIND-MACHINE.json (`result` plus date, commit and machine) and a page beside it."""
    from benchmarks import roofline as machine  # imports torch, so only after the measurement

    about, today = machine.describe(), datetime.date.today().isoformat()
    kept = {"date": today, "commit": commit(), "machine": about, **result}
    folder.mkdir(parents=True, exist_ok=True)
    path = free_name(folder, f"{today}-{kind}-{machine.slug(about)}")
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    page = (
        f"# {title}, {today}\n\nMachine: {about['cpu']}, {about['cores']} cores, kernels {about['kernels']}, load"
        f" {about['load']:.1f} at the end; torch {about['torch']}. `{result['command']}`, commit {kept['commit']}.\n\n{table}\n"
    )
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    return path
