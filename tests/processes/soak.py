"""A server under a random mixture for minutes: `python tests/processes/soak.py --seconds 600` (`make soak`).

The embedded model in float32: streams and whole answers, chats and completions, hang-ups at any moment, half requests,
odd bodies, broken bytes, several at once, everything that a request may ask for (`request_mix.py`), and more new grammars
at once than are kept; and attacks among them (`attack_mix.py`): grammars that never compile, pipelines, heads without end,
large fields, answers of gigabytes, answers that are not read, silent connections. Further words are the server's: `--scheduling-policy priority --api-server-count 2`. At the end every row and block is free; processes, file descriptors, threads and memory are where they
were; and every completed answer has the tokens that were given alone (greedy). Prints what it did; exit status 1 if
anything is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

import attack_mix
import httpx
import malformed_requests
import request_mix
from server_process import GRAMMAR, RANK, Served, children, running

MODEL = "quire-tiny"
# A cache that 16 long requests do not fit into at once, so that some give way and come back.
FLAGS = ("--max-num-seqs", "16", "--kv-cache-memory-bytes", "6M", "--max-model-len", "512")
SUBJECTS = ("the sea", "a red door", "numbers", "my uncle's boat", "Tuesday", "x = 3", "été", "why")
PROMPTS = [f"{'Once upon a time, ' * (number % 5)}tell me about {subject}." for number, subject in enumerate(SUBJECTS)]  # fmt: skip
LENGTHS = (1, 7, 24, 60)
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
KINDS = {
    "whole": 4,
    "stream": 5,
    "several": 1,
    "hang up": 3,
    "half": 1,
    "noise": 1,
    "odd": 3,
    "drawn": 6,
    "grammars": 0.1,
    "hostile": 3,
}
ODD_PATIENCE_S = 5.0
GRAMMARS = 80
PATIENCE_S = 240.0
SETTLED_S = 60.0
POOL = 4 + (os.cpu_count() or 1)  # the most threads of an event loop's own pool


def asked(path: str, prompt: str, length: int, stream: bool) -> dict[str, Any]:
    words = {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}  # fmt: skip
    return words | {"max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": stream, "return_token_ids": True}  # fmt: skip


def written(body: dict[str, Any], path: str) -> bytes:
    """The bytes of a request."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


Alone = dict[tuple[str, str], list[int]]


def alone(server: Served) -> Alone:
    """The tokens of each prompt's longest answer, with nothing beside it. The shorter ones are its beginnings."""
    found = {}
    for path in (TEXT, CHAT):
        for prompt in PROMPTS:
            answer = server.post(path, **asked(path, prompt, max(LENGTHS), False))
            found[path, prompt] = answer["choices"][0]["token_ids"]
            if len(found[path, prompt]) != max(LENGTHS):
                raise RuntimeError(f"{prompt!r} got {len(found[path, prompt])} tokens")
    return found


class Soak:
    """Clients that ask, hang up and send nonsense until the time is over."""

    def __init__(self, url: str, expected: Alone, seconds: float, seed: int):
        self.url, self.expected, self.end = url, expected, time.monotonic() + seconds
        self.draw = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, clients: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, limits=limits) as http:
            await asyncio.gather(*(self.client(http) for _ in range(clients)))

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            what = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
            path, prompt = self.draw.choice((TEXT, CHAT)), self.draw.choice(PROMPTS)
            length = self.draw.choice(LENGTHS)
            self.did[what] += 1
            try:
                match what:
                    case "whole":
                        await self.whole(http, path, prompt, length)
                    case "several":
                        await self.several(http, length)
                    case "stream":
                        await self.streamed(http, path, prompt, length)
                    case "hang up":
                        await self.hang_up(http, path, prompt)
                    case "half":
                        await self.half(path, prompt)
                    case "noise":
                        await self.noise(path, prompt)
                    case "odd":
                        await self.odd(http)
                    case "drawn":
                        await self.drawn(http, *request_mix.body(self.draw))
                    case "grammars":
                        await self.grammars(http)
                    case "hostile":
                        await self.hostile(http)
            except (httpx.HTTPError, KeyError, ValueError, IndexError) as error:
                self.wrong.append(f"{what} {path} {prompt!r} {length}: {type(error).__name__}: {error}")  # fmt: skip

    def check(self, path: str, prompt: str, length: int, tokens: list[int]) -> None:
        expected = self.expected[path, prompt][:length]
        self.did["tokens"] += len(tokens)
        if tokens != expected:
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), min(len(tokens), len(expected)))  # fmt: skip
            self.wrong.append(f"{path} {prompt!r}: {len(tokens)} tokens for {length}, unlike those given alone from {at} on")  # fmt: skip

    async def whole(self, http: httpx.AsyncClient, path: str, prompt: str, length: int) -> None:
        answer = await http.post(path, json=asked(path, prompt, length, False))
        self.check(path, prompt, length, answer.json()["choices"][0]["token_ids"])

    async def several(self, http: httpx.AsyncClient, length: int) -> None:
        prompts = self.draw.sample(PROMPTS, 3)
        answer = await http.post(TEXT, json=asked(TEXT, "", length, False) | {"prompt": prompts})
        for prompt, choice in zip(prompts, answer.json()["choices"], strict=True):
            self.check(TEXT, prompt, length, choice["token_ids"])

    async def streamed(self, http: httpx.AsyncClient, path: str, prompt: str, length: int) -> None:
        tokens: list[int] = []
        ended = False
        async with http.stream("POST", path, json=asked(path, prompt, length, True)) as answer:
            async for line in answer.aiter_lines():
                ended |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or []
        self.check(path, prompt, length, tokens)
        if not ended:
            self.wrong.append(f"{path} {prompt!r}: the stream has no end")

    async def hang_up(self, http: httpx.AsyncClient, path: str, prompt: str) -> None:
        body = asked(path, prompt, max(LENGTHS), self.draw.random() < 0.5)
        try:
            async with asyncio.timeout(self.draw.random() * 0.5), http.stream("POST", path, json=body) as answer:  # fmt: skip
                async for _ in answer.aiter_lines():
                    pass
        except TimeoutError:
            self.did["hung up"] += 1

    async def half(self, path: str, prompt: str) -> None:
        """A request that breaks off somewhere in its head or body."""
        sent = written(asked(path, prompt, 9, True), path)
        _, writer = await self.connected()
        writer.write(sent[: self.draw.randrange(1, len(sent))])
        await asyncio.sleep(self.draw.random() * 0.1)
        if self.draw.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def noise(self, path: str, prompt: str) -> None:
        """Bytes that are a request but for a few of them, perhaps twice on one connection."""
        sent = bytearray(written(asked(path, prompt, 3, False), path) * self.draw.choice((1, 1, 2)))
        for _ in range(self.draw.choice((1, 2, 5, 40))):
            sent[self.draw.randrange(len(sent))] = self.draw.choice((0, 10, 13, 32, 48, 57, 58, 255, self.draw.randrange(256)))  # fmt: skip
        reader, writer = await self.connected()
        try:
            async with asyncio.timeout(ODD_PATIENCE_S):
                writer.write(sent)
                answer = (
                    await reader.readline()
                )  # an answer, or the end, or nothing while more is awaited
        except (TimeoutError, ConnectionError):
            answer = b""
        finally:
            writer.transport.abort()
        if answer.startswith(b"HTTP/1.1 5"):
            self.wrong.append(f"{bytes(sent)[:300]!r} got {answer!r}")
        self.did["noise answered"] += bool(answer)

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.url.removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port))

    async def drawn(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        """It is answered, whatever the answer is, and a stream has an end; now and then the client leaves before."""
        patience = self.draw.random() if self.draw.random() < 0.2 else PATIENCE_S
        try:
            async with asyncio.timeout(patience), http.stream("POST", path, json=body) as answer:
                lines = [line async for line in answer.aiter_lines()]
        except TimeoutError:
            self.did["drawn, left"] += 1
            if patience == PATIENCE_S:
                self.wrong.append(f"{path} {body} got no answer in {patience:g} s")
            return
        self.did[f"drawn, {answer.status_code}"] += 1
        if answer.status_code >= 500:
            self.wrong.append(f"{path} {body} got {answer.status_code}: {lines[:1]}")
        if answer.status_code == 200 and body.get("stream") and "data: [DONE]" not in lines:
            self.wrong.append(f"{path} {body}: the stream has no end")

    async def grammars(self, http: httpx.AsyncClient) -> None:
        start = self.draw.randrange(10**6)
        asked = {"prompt": "a", "max_tokens": 5}
        bodies = [asked | {"structured_outputs": {"regex": f"[a-z]{{1,9}}{start + number}"}} for number in range(GRAMMARS)]  # fmt: skip
        await asyncio.gather(*(self.drawn(http, TEXT, body) for body in bodies))

    async def hostile(self, http: httpx.AsyncClient) -> None:
        kind = self.draw.choices(("asked", "poured", "unread", "silent"), (6, 2, 1, 1))[0]
        self.did[f"hostile, {kind}"] += 1
        if kind == "asked":
            if wrong := await attack_mix.asked(self.draw, http):
                self.wrong.append(wrong)
            return
        try:
            await getattr(attack_mix, kind)(self.draw, self.connected)
        except ConnectionError:
            self.did["hostile, refused"] += 1

    async def odd(self, http: httpx.AsyncClient) -> None:
        method, path, headers, raw = malformed_requests.request(self.draw)
        fields = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
        try:
            async with asyncio.timeout(ODD_PATIENCE_S):
                answer = await http.request(method, path, content=raw, headers=fields)
        except TimeoutError:
            self.did["odd and long"] += 1
            return
        except httpx.InvalidURL:
            return
        if answer.status_code >= 500:
            self.wrong.append(f"{method} {path} {raw[:300]!r} got {answer.status_code}: {answer.text[:200]}")  # fmt: skip


def footprint(server: Served) -> dict[str, float]:
    """Of the server, its engines and their ranks; without the processes of grammars, which engines keep with a file each."""
    pids = [server.process.pid, *children(server.process.pid), *running(server.process.pid, RANK)]
    kept = len(running(server.process.pid, GRAMMAR))
    found = {"MiB": 0.0, "files": 0.0 - kept, "threads": 0.0, "processes": 0.0}
    for pid in pids:
        with contextlib.suppress(OSError):  # one for a grammar or a template may end meanwhile
            found["MiB"] += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
            found["files"] += len(os.listdir(f"/proc/{pid}/fd"))
            found["threads"] += len(os.listdir(f"/proc/{pid}/task"))
            found["processes"] += 1
    return found


def quiet(server: Served) -> bool:
    """Nothing runs, waits, or holds a block."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(server.metric(name) == 0 for name in names) and server.client.get("/load").json() == {"server_load": 0}  # fmt: skip


def settled(server: Served) -> bool:
    end = time.monotonic() + SETTLED_S
    while not quiet(server):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def leaks(before: dict[str, float], after: dict[str, float]) -> list[str]:
    # A thread more of a pool is made when none of them is free, which a short first round may not have come to.
    allowed = {"files": before["files"] + 2, "threads": before["threads"] + POOL + 2, "MiB": before["MiB"] * 1.03 + 16, "processes": before["processes"] + 1}  # fmt: skip
    return [f"{before[name]:.0f} {name} became {after[name]:.0f}" for name, most in allowed.items() if after[name] > most]  # fmt: skip


class Round(Protocol):
    """Clients until the time is over: what they did, and what was wrong."""

    did: Counter[str]
    wrong: list[str]

    async def run(self, clients: int) -> None: ...


def rounds(
    server: Served,
    recorded: Callable[[], Any],
    make: Callable[[Any, float, int], Round],
    clients: int,
    seconds: tuple[float, float],
    seed: int,
    spare_mib: float = 0.0,
) -> tuple[Round, list[str], str]:
    """Two rounds, and nothing may be left after either: the second must leave memory, files and threads as the first.

    Args:
        recorded: the answers with nothing beside; they must be the same at the end.
        make: a round, of those answers, its seconds and a seed.
        seconds: of the rounds. In the first one what is made once is made.
        spare_mib: how much memory may grow in the second.

    Returns:
        The second round, what was wrong, and the footprints in words.
    """
    server.client.timeout = PATIENCE_S
    expected = recorded()
    wrong: list[str] = []
    footprints: list[dict[str, float]] = []
    for number, (name, long) in enumerate(zip(("first", "second"), seconds, strict=True)):
        found = make(expected, long, seed + 1 - number)
        asyncio.run(found.run(clients))
        wrong += found.wrong
        if not settled(server):
            wrong.append(f"something still runs, waits or holds blocks after the {name} round")
        footprints.append(footprint(server))
    if recorded() != expected:
        wrong.append("answers given alone at the end differ from the start")
    before, after = footprints
    words = ", ".join(f"{name} {before[name]:.1f} -> {after[name]:.1f}" for name in before)
    return found, wrong + leaks(before | {"MiB": before["MiB"] + spare_mib}, after), words


def soak(server: Served, seconds: float, clients: int, seed: int) -> tuple[Round, list[str], str]:
    """The result of one run: requests, errors, and memory as text."""

    def make(expected: Alone, seconds: float, seed: int) -> Soak:
        return Soak(server.url, expected, seconds, seed)

    lengths = min(60, seconds), seconds  # memory of ranks and of the front grows for half a minute
    run, wrong, words = rounds(server, lambda: alone(server), make, clients, lengths, seed)
    return run, wrong, f"{words}, {server.metric('vllm:num_preemptions_total'):.0f} preemptions"


def options(about: str | None, seconds: float) -> tuple[argparse.Namespace, list[str]]:
    """Those of the command line, and the server's."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_known_args()


def verdict(result: tuple[Round, list[str], str], lines: list[str], marks: tuple[str, ...] = ("Traceback", " CRITICAL")) -> int:  # fmt: skip
    """Prints the result; the exit status. `marks`: a line of the server's log with one of them is wrong, too."""
    run, wrong, words = result
    starts = [at for at, line in enumerate(lines) if any(mark in line for mark in marks)]
    died = ["\n".join(lines[at : at + 60]) for at in starts]
    print(dict(run.did), words)
    for line in [*wrong[:20], *died[:3]]:
        print("WRONG:", line)
    return 1 if wrong or died else 0


def main() -> int:
    given, flags = options(__doc__, 600)
    with Served(MODEL, *FLAGS, *flags) as server:
        found = soak(server, given.seconds, given.clients, given.seed)
        lines = server.lines
    return verdict(found, lines)


if __name__ == "__main__":
    sys.exit(main())
