"""A server under a random mixture for minutes: `python tests/processes/soak.py --seconds 600`.

Streams and whole answers, hang-ups, odd bodies, several at once. At the end every row and block is free, file
descriptors and memory are where they were, and every completed answer equals the one that was given alone
(greedy, float32). Prints what it did; exit status 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from serving import Served, children
from tiny_llama import make_checkpoint

TEXT = "/v1/completions"
PROMPTS = [f"{'word ' * (number % 7)}{number}" for number in range(24)]
LENGTHS = (1, 7, 40, 120)
ODD = [b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "n": 0}', b'{"prompt": "a", "max_tokens": -1}',
       b'{"prompt": "' + b"x" * 5000 + b'"}', b'{"prompt": "a", "logit_bias": {"999999": 1}}']  # fmt: skip


def asked(prompt: str, length: int, stream: bool) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": stream}  # fmt: skip


def alone(server: Served) -> dict[tuple[str, int], str]:
    found = {}
    for prompt in PROMPTS:
        for length in LENGTHS:
            answer = server.post(TEXT, **asked(prompt, length, False))
            found[prompt, length] = answer["choices"][0]["text"]
    return found


class Soak:
    """Clients that ask, hang up and send nonsense until the time is over."""

    def __init__(self, url: str, expected: dict[tuple[str, int], str], seconds: float, seed: int):
        self.url, self.expected, self.end = url, expected, time.monotonic() + seconds
        self.draw = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, clients: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            await asyncio.gather(*(self.client(http) for _ in range(clients)))

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            what = self.draw.choices(("whole", "stream", "hang up", "odd"), (4, 4, 3, 1))[0]
            prompt, length = self.draw.choice(PROMPTS), self.draw.choice(LENGTHS)
            self.did[what] += 1
            if what == "whole":
                answer = await http.post(TEXT, json=asked(prompt, length, False))
                self.check(prompt, length, answer.json()["choices"][0]["text"])
            elif what == "stream":
                self.check(prompt, length, await self.streamed(http, prompt, length))
            elif what == "hang up":
                await self.hang_up(http, prompt, self.draw.random() < 0.5)
            else:
                headers = {"Content-Type": "application/json"}
                answer = await http.post(TEXT, content=self.draw.choice(ODD), headers=headers)
                if not 400 <= answer.status_code < 500:
                    self.wrong.append(f"an odd body got {answer.status_code}: {answer.text[:200]}")

    def check(self, prompt: str, length: int, text: str) -> None:
        if text != self.expected[prompt, length]:
            self.wrong.append(f"{prompt!r}, {length} tokens: {text!r}, alone {self.expected[prompt, length]!r}")  # fmt: skip

    async def streamed(self, http: httpx.AsyncClient, prompt: str, length: int) -> str:
        parts = []
        async with http.stream("POST", TEXT, json=asked(prompt, length, True)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line[6:])["choices"][0]["text"])
        return "".join(parts)

    async def hang_up(self, http: httpx.AsyncClient, prompt: str, stream: bool) -> None:
        body = asked(prompt, 120, stream)
        try:
            async with asyncio.timeout(self.draw.random() * 0.2), http.stream("POST", TEXT, json=body) as answer:  # fmt: skip
                async for _ in answer.aiter_lines():
                    pass
        except TimeoutError:
            self.did["hung up"] += 1


def footprint(server: Served) -> dict[str, float]:
    pids = [server.process.pid, *children(server.process.pid)]
    memory = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)
    files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return {"MiB": memory / 2**20, "files": files}


def quiet(server: Served) -> bool:
    """Nothing runs, waits, or holds a block."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(server.metric(name) == 0 for name in names) and server.client.get("/load").json() == {"server_load": 0}  # fmt: skip


def settled(server: Served) -> bool:
    end = time.monotonic() + 20
    while not quiet(server):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--served-model-name", "tiny", "--max-num-seqs", "16"]
        with Served(make_checkpoint(Path(folder)), *flags) as server:
            expected = alone(server)
            # A first round, so that what is made once has been made.
            asyncio.run(Soak(server.url, expected, min(10, given.seconds / 4), 1).run(given.clients))  # fmt: skip
            wrong = [] if settled(server) else ["something still runs after the first round"]
            before = footprint(server)
            soak = Soak(server.url, expected, given.seconds, given.seed)
            asyncio.run(soak.run(given.clients))
            wrong += soak.wrong
            if not settled(server):
                wrong.append("something still runs, waits or holds blocks at the end")
            after = footprint(server)
            if after["files"] > before["files"] + 2:
                wrong.append(f"{before['files']:.0f} open files became {after['files']:.0f}")
            if after["MiB"] > before["MiB"] * 1.05 + 16:
                wrong.append(f"{before['MiB']:.0f} MiB became {after['MiB']:.0f}")
    print(dict(soak.did), f"memory {before['MiB']:.1f} -> {after['MiB']:.1f} MiB, files {before['files']:.0f} -> {after['files']:.0f}")  # fmt: skip
    for line in wrong[:20]:
        print("WRONG:", line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
