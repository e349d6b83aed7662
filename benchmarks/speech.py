"""`python -m benchmarks speech`: Whisper beside Transformers, faster-whisper (CTranslate2) and whisper.cpp.

Windows of 30 s of noise become a fixed number of tokens each, drawn greedily: so random weights cost what trained ones do. Every
engine gets samples, and makes its own spectrograms. `30s` is a window of each client; `10min` are 20 (`--minutes`), of which an engine
computes as many at once as is best for it. Each engine is a process with its own environment (`benchmarks/peers/install.py
faster-whisper whisper-cpp`). Within each round the engines alternate, and SIGSTOP stops all but one; medians count. Linux only.

`--only` runs some of the pieces, `--shape` one of the models: each piece of 3 rounds takes less than 6 minutes on 2 cores, but for
`10min-8`, for which `--minutes 1` is enough, as batches are full. A piece replaces its rows in the result file of the day.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import roofline, speech_models
from benchmarks.peers.run import PATIENCE_S, Running, in_environment, last_words, started
from benchmarks.result_files import commit
from quire.errors import ConfigError, QuireError, StartupError

WINDOW_S = 30
PIECES = {"30s-1": (1, 0.5), "30s-8": (8, 0.5), "10min-1": (1, 10.0), "10min-8": (8, 10.0)}
"""Clients, and minutes of sound of each"""
ENGINES: dict[str, dict[str, Any]] = {
    "quire": {"script": "run_quire_speech.py", "options": {"dtype": "bfloat16"}},
    "quire f32": {"script": "run_quire_speech.py", "options": {"dtype": "float32"}},
    "quire int8": {"script": "run_quire_speech.py", "options": {"dtype": "bfloat16", "quantization": "int8"}},
    "transformers bf16": {"script": "run_transformers_speech.py", "options": {"dtype": "bfloat16"}},
    "transformers f32": {"script": "run_transformers_speech.py", "options": {"dtype": "float32"}},
    "faster-whisper f32": {"script": "run_faster_whisper.py", "python": "faster-whisper", "options": {"compute_type": "float32"}},
    "faster-whisper int8": {"script": "run_faster_whisper.py", "python": "faster-whisper", "options": {"compute_type": "int8"}},
    "whisper.cpp f16": {"script": "run_whisper_cpp.py", "python": "whisper-cpp", "options": {}},
}  # fmt: skip
GOALS = {"transformers": 2.0, "faster-whisper": 1.3, "whisper.cpp": 1.3}
"""Quire's speed divided by the peer's"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks speech", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=speech_models.SHAPES, default="base", help="of Whisper")
    add("--only", nargs="+", choices=PIECES, default=list(PIECES), help="pieces; unset: all")
    add("--engines", nargs="+", metavar="NAME", default=list(ENGINES),
        help=f"of {', '.join(ENGINES)}, or the beginning of several; unset: all")  # fmt: skip
    add("--rounds", type=int, default=3, help="runs of each piece; medians count")
    add("--tokens", type=int, default=100, help="of each window")
    add("--minutes", type=float, default=10.0, help="of sound of a client, in the place of 10")
    add("--threads", type=int, default=os.cpu_count(), help="of each engine")
    add("--patience", type=float, default=PATIENCE_S, help="seconds for a start, and for a turn")
    add("--peers", type=Path, default=Path(".cache/peers"), help="folder of the environments")
    add("--scripts", type=Path, default=Path("benchmarks/peers"), help="folder of the scripts")
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "quire-bench", help="folder of the random checkpoints")  # fmt: skip
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder of results")
    given = parser.parse_args(argv)
    chosen = [name for name in ENGINES if any(name.startswith(one) for one in given.engines)]
    if not chosen:
        parser.error(f"--engines: not one of {', '.join(ENGINES)}")
    try:
        rows = measure(given, chosen)
    except QuireError as why:
        print(f"python -m benchmarks speech: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1
    keep(given, " ".join(["python -m benchmarks speech", *argv]), rows)
    return 0


def measure(given: argparse.Namespace, chosen: list[str]) -> list[dict[str, Any]]:
    """A row for each piece and engine. Raises ConfigError: this is not the repository."""
    if not (given.scripts / "lines.py").is_file():
        raise ConfigError(f"--scripts {given.scripts}: no such scripts; run it in the repository")
    source = speech_models.checkpoint(given.shape, given.cache)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as open_:
        running: dict[str, Running] = {}
        failed: dict[str, str] = {}
        for name in chosen:
            try:
                asked = asked_of(name, source, given)
                running[name] = open_.enter_context(started(name, asked, given))
            except StartupError as why:
                failed[name] = str(why)
                print(f"{name}: {why}", flush=True)
        for piece in given.only:
            clients, minutes = PIECES[piece]
            each = 1 if minutes < 1 else max(1, round(given.minutes * 60 / WINDOW_S))
            times = turns(running, clients * each, given)
            about = {"shape": given.shape, "piece": piece, "windows": clients * each, "tokens": given.tokens}  # fmt: skip
            rows += [{**about, "engine": name, "seconds": times[name], "about": one.about, "ended": one.ended} for name, one in running.items()]  # fmt: skip
            rows += [{**about, "engine": name, "failed": why} for name, why in failed.items()]
    return rows


def asked_of(name: str, source: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What an engine's script gets. Raises StartupError: its model cannot be converted."""
    engine = ENGINES[name]
    model = source
    if engine["script"] == "run_whisper_cpp.py":
        model = speech_models.ggml(source)
    elif engine["script"] == "run_faster_whisper.py":
        model = source.with_name(f"{source.name}-ctranslate2")
        if not (model / "model.bin").exists():
            asked = {"source": str(source), "model": str(model)}
            done = in_environment(given, engine["python"], "to_ctranslate2.py", asked)
            if done.returncode:
                raise StartupError(f"{name}: {last_words(done.stderr)}")
    return {
        "script": engine["script"], "python": engine.get("python"), "group": "", "kv_gib": 1, "model": str(model), "threads": given.threads,
        "prompt": speech_models.PROMPT, "end": speech_models.END, "rows": 32, "tokens": given.tokens, "options": engine["options"],
    }  # fmt: skip


def turns(
    running: dict[str, Running], windows: int, given: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each round, by engine."""
    found: dict[str, list[float]] = {name: [] for name in running}
    prompts = [[number] for number in range(windows)]
    for number in range(given.rounds):
        for name, one in running.items():
            if one.ended:
                continue
            try:
                answer = one.ask(prompts, given.tokens)
            except StartupError as why:
                one.ended = f"with {windows} windows, round {number + 1}: {why}"
                print(one.ended, flush=True)
                continue
            found[name].append(round(answer["seconds"], 4))
            print(f"{windows} windows, round {number + 1}: {name} {answer['seconds']:.2f} s", flush=True)  # fmt: skip
    return found


# -- results --------------------------------------------------------------------------------------
def keep(given: argparse.Namespace, command: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows into the result file of the day, in the place of those of the same piece, shape and engine; print the tables."""
    machine, today = roofline.describe(), datetime.datetime.now(datetime.UTC).date().isoformat()
    path = given.out / f"{today}-speech-{roofline.slug(machine)}.json"
    given.out.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"commands": [], "rows": []}  # fmt: skip
    key = lambda row: (row["shape"], row["piece"], row["engine"])  # noqa: E731
    new = {key(row) for row in rows}
    result = {
        "date": today, "commit": commit(), "machine": machine, "commands": [*kept["commands"], command],
        "rows": [*(row for row in kept["rows"] if key(row) not in new), *rows],
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = page(result)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nresult in {path}")


def page(result: dict[str, Any]) -> str:
    """The whole Markdown page."""
    machine = result["machine"]
    lines = [
        f"# Whisper beside other engines, {result['date']}", "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, kernels {machine['kernels']}; torch {machine['torch']}; commit {result['commit']}.",
        *(f"`{command}`" for command in result["commands"]), "",
        "Medians; random weights, a fixed number of tokens for each window of 30 s. `x real time`: seconds of sound in a second.",
    ]  # fmt: skip
    pieces = dict.fromkeys((row["shape"], row["piece"]) for row in result["rows"])
    for shape, piece in sorted(pieces):
        some = [row for row in result["rows"] if (row["shape"], row["piece"]) == (shape, piece)]
        lines += ["", f"## {shape}, {piece}", "", *table(some)]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Of one piece. Quire's speed is divided by that of each peer: by the faster of its 16- and 32-bit runs, and for 8 bits its int8 run."""
    times = {row["engine"]: statistics.median(row["seconds"]) for row in rows if row.get("seconds")}
    lines = ["| engine | windows | s | x real time | quire is | aim |", "|---|---|---|---|---|---|"]
    for row in rows:
        name = row["engine"]
        if name not in times:
            why = row.get("failed") or row.get("ended") or "no round"
            lines.append(f"| {name} | {row['windows']} | {why} | | | |")
            continue
        own = times.get("quire int8") if name.endswith("int8") else None
        ours = min([own] if own else [times[one] for one in ("quire", "quire f32") if one in times], default=None)  # fmt: skip
        goal = next((aim for kind, aim in GOALS.items() if name.startswith(kind)), None)
        ratio = "" if ours is None or goal is None else f"{times[name] / ours:.2f} x"
        speed = row["windows"] * WINDOW_S / times[name]
        lines.append(f"| {name} | {row['windows']} | {times[name]:.3g} | {speed:.3g} | {ratio} | {goal or ''} |")  # fmt: skip
    return lines
