"""`python -m benchmarks loading`: memory during model load, and seconds from process start to the first token.

Each start is a new process, which the benchmark watches from outside. It counts anonymous memory, which the kernel
cannot reclaim, unlike pages of the checkpoint's file. It reports the memory before the load (mostly libraries)
separately; the goal limits what the load adds, relative to the size of the weights in their final form. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import result_files, shapes
from quire import env
from quire.errors import StartupError

GOAL_MEMORY, GOAL_SECONDS = 1.15, 8.0
WATCH_S = 0.003
ROOM = 64 << 20  # bytes of KV cache, which the benchmark does not measure


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--child"]:
        return child(json.loads(argv[1]))
    parser = argparse.ArgumentParser(prog="python -m benchmarks loading", description=__doc__)
    add = parser.add_argument
    shapes.add_options(parser)
    add("--quantizations", nargs="+", default=["none", "int8", "int4"], metavar="NAME", help="each in turn")  # fmt: skip
    add("--rounds", type=int, default=2, help="starts of each; it prints the medians")
    given = parser.parse_args(argv)
    model = str(shapes.checkpoint(shapes.SHAPES[given.shape], "bfloat16", given.cache))
    found: dict[str, list[dict[str, float]]] = {}
    try:
        for _ in range(given.rounds):
            for name in given.quantizations:
                asked = {} if name == "none" else {"quantization": name}
                found.setdefault(name, []).append(once({"model": model, **asked}))
    except StartupError as why:
        print(f"python -m benchmarks loading: error: {why}", file=sys.stderr)
        return 1
    kept = {"command": " ".join(["python -m benchmarks loading", *argv]), "shape": given.shape, "starts": found}  # fmt: skip
    result_files.report(given.out, "loading", f"What loading {given.shape} takes", kept, table(found))  # fmt: skip
    return 0


def child(keywords: dict[str, Any]) -> int:
    """The watched process: import, report, load, generate a token, report memory."""
    import torch  # noqa: F401 - every start imports it before the load

    from benchmarks.offline.runners import Quire
    from benchmarks.shapes import Workload
    from quire.engine import build  # noqa: F401

    print(json.dumps({"base": anonymous("self")}), flush=True)
    sys.stdin.readline()  # wait for the watcher
    options = {"kv_cache_memory_bytes": ROOM, **keywords}
    engine = Quire(Path(options.pop("model")), "bfloat16", 4, 128, options)
    engine.run(Workload(1, 8, 1), [list(range(1, 9))])
    print(json.dumps({"token": True}), flush=True)
    from quire.quantization.apply import weight_bytes

    client: Any = engine.client
    weights = weight_bytes(client.core.executor.worker.model)
    print(json.dumps({"weights": weights, "held": anonymous("self")}), flush=True)
    engine.close()
    return 0


def anonymous(pid: int | str) -> int:
    """Anonymous resident memory in bytes; 0 for a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def once(keywords: dict[str, Any]) -> dict[str, float]:
    """One start. Raises StartupError: the process ended early; the message has the end of its output."""
    words = [sys.executable, "-m", "benchmarks", "loading", "--child", json.dumps(keywords)]
    said: dict[str, float] = {}
    peak = 0
    over = threading.Event()
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env.for_a_child()
        ) as process:  # fmt: skip

            def watch() -> None:
                nonlocal peak
                while not over.wait(WATCH_S):
                    peak = max(peak, anonymous(process.pid))

            watcher = threading.Thread(target=watch)
            watcher.start()
            for line in process.stdout or ():
                said |= json.loads(line)
                if "token" in said and "seconds" not in said:
                    said["seconds"] = time.perf_counter() - began
                    over.set()
                if "weights" not in said and "token" not in said and process.stdin is not None:
                    print(file=process.stdin, flush=True)
            over.set()
            watcher.join()
        if "held" not in said:
            errors.seek(0)
            raise StartupError(f"it did not load (status {process.returncode}):\n{errors.read()[-2000:]}")  # fmt: skip
    return {name: said[name] for name in ("seconds", "base", "weights", "held")} | {"peak": peak}


def table(found: dict[str, list[dict[str, float]]]) -> str:
    mib = 2**20
    lines = [
        "| weights | in use, MiB | before, MiB | peak, MiB | after, MiB | peak over before, of the weights | goal | first token, s | goal |",
        "|---" * 9 + "|",
    ]
    for name, starts in found.items():
        one = {key: median(start[key] for start in starts) for key in starts[0]}
        share = (one["peak"] - one["base"]) / one["weights"]
        lines.append(
            f"| {'bfloat16' if name == 'none' else name} | {one['weights'] / mib:.0f} | {one['base'] / mib:.0f} | {one['peak'] / mib:.0f} |"
            f" {one['held'] / mib:.0f} | {share:.0%} | {GOAL_MEMORY:.0%} | {one['seconds']:.1f} | {GOAL_SECONDS:.0f} |"
        )
    return "\n".join(lines)
