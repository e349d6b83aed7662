"""The page of `python -m benchmarks peers`: each engine's speed, compared with the best other engine of its group.

Knows the measured turns. Does not know how engines run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

OTHERS = {
    "AMD": "AMD Zen 5 (AVX512-BF16, no AMX), 2 cores",
    "Intel": "Intel Xeon (AMX), 2 cores",
}
"""Vendor -> a kind of machine to measure; a page lists the kinds that it has no results for as open."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of one workload by one engine."""

    engine: str
    workload: str
    tokens: int
    seconds: float
    floor: float  # seconds, at the speeds probed before and after it
    bytes_per_s: float  # mean of both probes
    equal: float  # share of tokens that equal the tokens of its group's first engine

    def line(self) -> str:
        return (
            f"{self.workload:>9}  {self.engine:<14} {self.seconds:8.3f} s {self.tokens / self.seconds:8.2f} tokens/s"
            f"  {self.floor / self.seconds:4.0%} of the floor at {self.bytes_per_s / 1e9:.1f} GB/s"
        )

    def kept(self) -> dict[str, Any]:
        return {name: round(v, 5) if isinstance(v, float) else v for name, v in asdict(self).items()}  # fmt: skip


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per group, workload and engine: medians over its turns, and the ratio to the best peer of the group."""
    found: list[dict[str, Any]] = []
    turns = [Turn(**turn) for turn in result["turns"]]
    for group in dict.fromkeys(about["group"] for about in result["engines"].values()):
        names = [name for name, about in result["engines"].items() if about["group"] == group]
        for workload in dict.fromkeys(turn.workload for turn in turns):
            taken = {name: [t for t in turns if (t.engine, t.workload) == (name, workload)] for name in names}  # fmt: skip
            speeds = {name: _speed(those) for name, those in taken.items() if those}
            peers = [speed for name, speed in speeds.items() if not _ours(name)]
            for name, speed in speeds.items():
                those = taken[name]
                found.append({
                    "group": group, "workload": workload, "engine": name, "tokens_per_s": speed, "turns": len(those),
                    "first_per_s": _speed(those[:1]),
                    "of_best_peer": speed / max(peers) if peers else None,
                    "gb_per_s": median(t.bytes_per_s for t in those) / 1e9,
                    "floor_s": median(t.floor for t in those),
                    "of_floor": median(t.floor / t.seconds for t in those),
                    "equal": median(t.equal for t in those),
                    "first_token_s": result["engines"][name]["first_token_s"],
                })  # fmt: skip
    return found


def _speed(turns: Sequence[Turn]) -> float:
    return turns[0].tokens / median(turn.seconds for turn in turns)


def _ours(name: str) -> bool:
    return name.startswith("quire")


TITLES = ("weights", "workload", "engine", "turns", "tokens/s", "first turn", "to the best peer", "read, GB/s", "floor, s",
          "of floor", "equal tokens", "first token after, s")  # fmt: skip


def table(result: dict[str, Any]) -> str:
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    for row in rows(result):
        ratio = row["of_best_peer"]
        cells = [
            row["group"], row["workload"], f"**{row['engine']}**" if _ours(row["engine"]) else row["engine"],
            str(row["turns"]), f"{row['tokens_per_s']:.3g}", f"{row['first_per_s']:.3g}",
            "" if ratio is None else f"{ratio:.2f}x", f"{row['gb_per_s']:.1f}", f"{row['floor_s']:.3g}",
            f"{row['of_floor']:.0%}", f"{row['equal']:.0%}", f"{row['first_token_s']:.1f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    for name, about in result["engines"].items():
        if "failed" in about:
            lines.append(f"| {about['group']} | all | {name} |{' - |' * (len(TITLES) - 3)}")
    return "\n".join(lines)


def open_rows(cpu: str) -> str:
    """The kinds of machine without results on this page."""
    kinds = [words for vendor, words in OTHERS.items() if vendor not in cpu]
    lines = ["| machine | tokens/s | to the best peer |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {words} | open: not measured yet | open |" for words in kinds)])


def engines(result: dict[str, Any]) -> str:
    lines = ["| engine | what ran | ready after, s | first token after, s | resident, MiB |", "|---|---|---|---|---|"]  # fmt: skip
    for name, about in result["engines"].items():
        if "failed" in about:
            lines.append(f"| {name} | could not run: {about['failed']} | - | - | - |")
            continue
        words = ", ".join(f"{key} {value}" for key, value in about["about"].items() if value != "")
        lines.append(
            f"| {name} | {words} | {about['ready_s']:.1f} | {about['first_token_s']:.1f} | {about['resident_mib']} |"
        )
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    about = result["machine"]
    return "\n".join([
        f"# {result['shape']} beside other engines, {result['date']}",
        "",
        f"Command: `{result['command']}`, commit {result['commit']}.",
        f"Machine: {about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['capability']},"
        f" kernels {about['kernels']}, load {about['load']:.1f}"
        f" at the start; {about['system']}. Python {about['python']}, torch {about['torch']}.",
        "",
        f"{result['rounds']} rounds, the engines in turn within each; medians. Random weights, greedy, no end of text, prefix caches"
        " off; tokens/s counts the generated ones. Read: memory bandwidth between the turns. The floor is the time at the better of"
        " the speeds probed before and after a turn, with the weights and keys and values of that engine's formats and nothing else"
        " to do. Equal tokens: to where an answer first differs from the answer of its group's first engine; with random weights that is soon."
        " First turn: its tokens/s, with memory that is written for the first time.",
        "",
        table(result),
        "",
        engines(result),
        "",
        "Other kinds of machine:",
        "",
        open_rows(about["cpu"]),
        "",
    ])  # fmt: skip
