"""`python -m benchmarks picture-clients`: requests per second of clients that send pictures, beside other servers.

16 clients each send the next request when the last one ends, with a JPEG of about 1 MB of its own as a data URL. The model is the random LLaVA of
`python -m benchmarks pictures`, a few MB, so that what a server does around the model counts. Servers take turns within each round, each
freshly started. Aim: 2 times vLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import pictures, result_files, serving_cost
from quire.bench.serve.http_client import HttpFailed, reason
from quire.errors import ConfigError, QuireError

AIM = 2.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks picture-clients", description=__doc__)  # fmt: skip
    add = parser.add_argument
    add("--clients", type=int, default=16, metavar="N")
    add("--requests", type=int, default=4, metavar="N", help="of each client")
    add("--side", type=int, default=1024, metavar="PIXELS", help="of each picture")
    add("--output-len", type=int, default=4, metavar="TOKENS", help="of each request")
    add("--rounds", type=int, default=3, metavar="N", help="it prints the medians")
    add(
        "--flags",
        default="--max-num-seqs 32",
        metavar="WORDS",
        help="more flags for our own server",
    )
    add("--peer", action="append", default=[], metavar="NAME[=COMMAND]", help="another server: see `python -m benchmarks serving`")  # fmt: skip
    add("--peers", type=Path, default=Path(".cache/peers"), help="where peers are installed")
    add("--cache", type=Path, default=Path(".cache"), help="folder of the random model")
    add("--out", type=Path, help="folder for the result; unset: print only")
    given = parser.parse_args(argv)
    try:
        commands = [f"{serving_cost.QUIRE} {given.flags}"]
        commands += [serving_cost.known(peer, given.peers) for peer in given.peer]
        servers = dict(map(serving_cost.named, commands))
        found = asyncio.run(_measured(given, servers))
    except QuireError as why:
        print(f"python -m benchmarks picture-clients: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1
    result = {
        "command": " ".join(["python -m benchmarks picture-clients", *argv]),
        "aim": AIM,
        "clients": given.clients,
        "requests_per_s": found,
    }
    result_files.report(
        given.out, "picture-clients", "Clients that send pictures", result, table(result)
    )
    return 0


async def _measured(given: argparse.Namespace, servers: dict[str, str]) -> dict[str, list[float]]:
    model = str(pictures.checkpoint(given.cache / "pictures-llava"))
    found: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(given.rounds):
        for name, command in servers.items():
            async with serving_cost.started(name, command, model) as running:
                draw = random.Random(number)
                count = given.clients * (given.requests + 1)
                bodies = [pictures.body(running.model, draw, given) for _ in range(count)]
                await _clients(running, bodies[: given.clients], given.clients)
                rate = await _clients(running, bodies[given.clients :], given.clients)
            found[name].append(round(rate, 3))
            print(f"{name}: {rate:.2f} requests/s", flush=True)
    return found


async def _clients(running: serving_cost.Running, bodies: list[bytes], count: int) -> float:
    """Requests per second. Raises HttpFailed: one failed."""
    left = list(bodies)

    async def client() -> None:
        while left:
            answer = await running.server.ask(
                "POST", "/v1/chat/completions", left.pop(), timeout=600
            )
            if answer.status != 200:
                raise HttpFailed(
                    f"a request with a picture: {answer.status}: {reason(answer.body)}"
                )

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(count)))
    return len(bodies) / (time.perf_counter() - began)


def table(result: dict[str, Any]) -> str:
    """A Markdown table of medians."""
    rates = {name: median(each) for name, each in result["requests_per_s"].items()}
    lines = ["| server | requests/s | Quire beside it |", "|---|---|---|"]
    for name, rate in rates.items():
        beside = "" if name == "quire" else f"{rates['quire'] / rate:.2f}x (aim {result['aim']}x)"
        lines.append(f"| {name} | {rate:.2f} | {beside} |")
    return "\n".join([*lines, "", f"{result['clients']} clients, each with one request at a time."])
