"""`python -m benchmarks streaming`: the cost of streaming to clients, compared with the same requests offline.

A Quire server and an engine in this process load the same random checkpoint and alternate within each round. The server
gets N requests at once and streams each token as text to the request's client; the engine runs the same prompts as one
offline batch. The load generator shares the machine with the server; its CPU time is reported. Linux only: CPU times
come from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import result_files, shapes
from benchmarks.serving_cost import Running, started
from quire.bench.serve.arrivals import Arrivals, run
from quire.bench.serve.endpoints import KINDS, BenchPrompt, RequestRecord, ask
from quire.bench.serve.http_client import HttpFailed
from quire.bench.serve.metrics import failures
from quire.errors import QuireError

GOAL = 0.05  # loss of offline speed


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks streaming", description=__doc__)
    add = parser.add_argument
    shapes.add_options(parser)
    add("--clients", type=int, default=32, metavar="N")
    add("--input-len", type=int, default=128, metavar="TOKENS")
    add("--output-len", type=int, default=64, metavar="TOKENS")
    add("--rounds", type=int, default=3, help="it prints the medians")
    add("--flags", default="", metavar="WORDS", help="more flags for the server")
    given = parser.parse_args(argv)
    try:
        found = asyncio.run(_measure(given))
    except QuireError as why:
        print(f"python -m benchmarks streaming: error: {why}", file=sys.stderr)
        return 1
    kept = {"command": " ".join(["python -m benchmarks streaming", *argv]), "shape": given.shape, **found}  # fmt: skip
    result_files.report(given.out, "streaming", "What streaming costs", kept, table(found))
    return 0


async def _measure(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.offline.runners import Quire

    shape = shapes.SHAPES[given.shape]
    workload = shapes.Workload(given.clients, given.input_len, given.output_len)
    prompts = workload.prompts(shape.vocab)
    model = shapes.checkpoint(shape, "bfloat16", given.cache)
    length = given.input_len + given.output_len + 1
    room = given.clients * (length + 128) * shape.kv_elements * 2
    flags = f"--max-num-seqs {given.clients} --max-model-len {length} --kv-cache-memory-bytes {room} --no-enable-prefix-caching"
    command = f"{shlex.quote(sys.executable)} -m quire serve {{model}} --port {{port}} {flags} {given.flags}"
    times: dict[str, list[float]] = {"offline": [], "streaming": [], "generator": []}
    async with started("quire", command, str(model)) as running:
        engine = Quire(model, "bfloat16", given.clients, length, {"kv_cache_memory_bytes": room})
        try:
            warm = shapes.Workload(2, 8, 2)
            engine.run(warm, warm.prompts(shape.vocab))
            await _stream(running, warm.prompts(shape.vocab), 2)
            for number in range(1, given.rounds + 1):
                times["offline"].append(engine.run(workload, prompts).seconds)
                began, own = time.perf_counter(), time.process_time()
                await _stream(running, prompts, given.output_len)
                times["streaming"].append(time.perf_counter() - began)
                times["generator"].append(time.process_time() - own)
                print(
                    f"round {number}  offline {times['offline'][-1]:.3f} s  streaming {times['streaming'][-1]:.3f} s",
                    flush=True,
                )
        finally:
            engine.close()
    return {"clients": given.clients, "tokens": workload.rows * workload.output, "seconds": times}


async def _stream(running: Running, prompts: list[list[int]], output: int) -> None:
    """Send all prompts at once. Raises HttpFailed: a request failed, or gave another number of tokens."""
    kind = KINDS["openai"]

    async def one(number: int) -> RequestRecord:
        more = {"model": running.model, "temperature": 0.0, "prompt": prompts[number]}
        asked = BenchPrompt("", len(prompts[number]), output)
        return await ask(
            running.server, kind, kind.path, asked, more, ignore_eos=True, clock=time.perf_counter
        )

    done, _ = await run(one, len(prompts), Arrivals(), 0, lambda _: None)
    if wrong := failures(done):
        raise HttpFailed(wrong)
    if any(one.output_tokens != output or (len(one.itls) < output // 2 - 1) for one in done):
        raise HttpFailed(f"an answer was not {output} tokens, or came in few pieces")


def table(found: dict[str, Any]) -> str:
    offline, streaming, own = (median(found["seconds"][name]) for name in ("offline", "streaming", "generator"))  # fmt: skip
    tokens, cost = found["tokens"], cost_of(found["seconds"])
    return "\n".join([
        "| clients | offline, tokens/s | streamed, tokens/s | streaming costs | goal | the load's own cores |",
        "|---|---|---|---|---|---|",
        f"| {found['clients']} | {tokens / offline:.1f} | {tokens / streaming:.1f} | {cost:.1%} | {GOAL:.0%} | {own / streaming:.2f} |",
    ])  # fmt: skip


def cost_of(seconds: dict[str, list[float]]) -> float:
    """The lost share of the offline speed: the median over rounds of the loss within a round."""
    pairs = zip(seconds["offline"], seconds["streaming"], strict=True)
    return median(1 - offline / streaming for offline, streaming in pairs)
