"""Two minutes of faults for each layout: `python tests/processes/soak_faults.py [--seconds N] [LAYOUT ...]`.

Clients stream, ask and hang up while engines and ranks are killed, stopped, killed again while the model loads, and paused for
a moment. Every answer that is whole has the tokens that were given alone, and one that breaks off a beginning of them. Requests
fail only during a kill or a stop, and then only on one engine; the other engine answers its requests. A pause fails none. Each
process is replaced within its time. At the end nothing runs; processes, files, threads and memory are as before, and nothing is
left in /dev/shm or among temporary files. Prints what it did; exit status 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
import soak
from server_process import ENGINE, RANK, Served, family, left, running

FLAGS = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "6M", "--max-model-len", "512")
LAYOUTS = {
    "engines": ("--data-parallel-size", "2"),
    "ranks": ("--tensor-parallel-size", "2"),
    "stages": ("--pipeline-parallel-size", "2"),
    "engines of ranks": ("--data-parallel-size", "2", "--tensor-parallel-size", "2"),
}
FAULTS = {"kill": 4, "stop": 2, "kill again": 2, "pause": 3}
PAUSE_S = 3.0  # shorter than the time after which an engine or a rank counts as stopped
REPLACED_S = 120.0
SPARE_MIB = 64
"""How much more a new process may hold than the one that it replaces, which the first round gave less time."""


@dataclass
class Fault:
    """One that was made, and the engines whose requests failed until it was over."""

    kind: str
    failed: Counter[int] = field(default_factory=Counter)


class FaultSoak:
    """Clients and a saboteur, until the time is over.

    Args:
        engines: how many there are.
        members: the processes of engines and ranks.
    """

    def __init__(self, url: str, expected: soak.Alone, engines: int, members: Callable[[], list[int]], seconds: float, seed: int):  # fmt: skip
        self.url, self.expected, self.engines, self.members = url, expected, engines, members
        self.end = time.monotonic() + seconds
        self.draw = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.deaths = 0
        self.fault: Fault | None = None
        self._numbers = itertools.count()

    async def run(self, clients: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=soak.PATIENCE_S, limits=httpx.Limits(max_connections=None)) as http:  # fmt: skip
            await asyncio.gather(self.saboteur(http), *(self.client(http) for _ in range(clients)))

    # -- clients --------------------------------------------------------------------------------
    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end or self.fault is not None:
            path, prompt = self.draw.choice((soak.TEXT, soak.CHAT)), self.draw.choice(soak.PROMPTS)
            engine = self.draw.choice([None, *range(self.engines)])
            patience = self.draw.random() if self.draw.random() < 0.2 else soak.PATIENCE_S
            try:
                async with asyncio.timeout(patience):
                    await self.ask(http, path, prompt, engine)
            except TimeoutError:
                self.did["hung up"] += 1
                if patience == soak.PATIENCE_S:
                    self.wrong.append(f"{path} {prompt!r} got no answer in {patience:g} s")
            except (httpx.HTTPError, KeyError, ValueError, IndexError) as error:
                self.wrong.append(f"{path} {prompt!r} {engine}: {type(error).__name__}: {error}")

    async def ask(self, http: httpx.AsyncClient, path: str, prompt: str, engine: int | None) -> None:  # fmt: skip
        """A stream, or a whole answer."""
        length, stream = self.draw.choice(soak.LENGTHS), self.draw.random() < 0.7
        # Two requests that are alike and run at two deaths are refused, so each has a number.
        body = soak.asked(path, prompt, length, stream) | {"vllm_xargs": {"n": next(self._numbers)}}
        headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        before = self.fault
        tokens: list[int] = []
        failure = ""
        async with http.stream("POST", path, json=body, headers=headers) as answer:
            if stream and answer.status_code == 200:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        failure = failure or str(event.get("error") or "")
                        for choice in event.get("choices", []):
                            tokens += choice.get("token_ids") or []
            else:
                raw = await answer.aread()
                if answer.status_code == 200:
                    tokens = json.loads(raw)["choices"][0]["token_ids"]
                else:
                    failure = f"{answer.status_code} {raw[:300]!r}"
        self.check(path, prompt, length, tokens, failure, engine, self.fault or before)

    def check(self, path: str, prompt: str, length: int, tokens: list[int], failure: str, engine: int | None, fault: Fault | None) -> None:  # fmt: skip
        """`fault`: one that there was during the request."""
        self.did["failed" if failure else "answered"] += 1
        self.did["tokens"] += len(tokens)
        wanted = self.expected[path, prompt][: len(tokens) if failure else length]
        if tokens != wanted:
            self.wrong.append(f"{path} {prompt!r}: {len(tokens)} tokens for {length}, unlike those given alone")  # fmt: skip
        if not failure:
            return
        if fault is None or fault.kind == "pause":
            self.wrong.append(f"{path} {prompt!r} for engine {engine} failed during {fault}: {failure}")  # fmt: skip
        elif engine is not None:
            fault.failed[engine] += 1
            if len(fault.failed) == 2:
                self.wrong.append(f"one {fault.kind} disturbed two engines: {dict(fault.failed)}; {failure}")  # fmt: skip

    # -- the saboteur ---------------------------------------------------------------------------
    async def saboteur(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            await asyncio.sleep(0.5 + 2 * self.draw.random())
            kind = self.draw.choices(list(FAULTS), list(FAULTS.values()))[0]
            self.did[kind] += 1
            members = self.members()
            self.fault = fault = Fault(kind)
            try:
                await self.make(fault, members)
                await self.healed(http, members, fault)
            except TimeoutError as error:
                self.wrong.append(f"{kind}: {error}")
                self.end = 0.0
            await asyncio.sleep(0.5)  # what failed has reached its clients
            self.fault = None

    async def make(self, fault: Fault, members: list[int]) -> None:
        victim = self.draw.choice(members)
        if fault.kind == "pause":
            os.kill(victim, signal.SIGSTOP)
            await asyncio.sleep(PAUSE_S * self.draw.random())
            os.kill(victim, signal.SIGCONT)
            return
        self.deaths += 1
        os.kill(victim, signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
        if fault.kind == "kill again":
            found = await until(
                lambda: set(self.members()) - set(members), lambda: "no process came"
            )
            await asyncio.sleep(2 * self.draw.random())
            self.deaths += 1
            with suppress(ProcessLookupError):
                os.kill(max(found), signal.SIGKILL)

    async def healed(self, http: httpx.AsyncClient, before: list[int], fault: Fault) -> None:
        """Wait until the processes of one engine, or for a pause of none, were replaced, and all are ready."""
        replaced = 0 if fault.kind == "pause" else len(before) // self.engines
        began = time.monotonic()

        def complete() -> bool:
            now = self.members()
            return len(now) == len(before) and len(set(now) - set(before)) == replaced

        while True:
            await until(
                complete, lambda: f"{replaced} of {before} were not replaced: {self.members()}"
            )
            if (await http.get("/health/ready")).status_code == 200 and complete():
                break
            await asyncio.sleep(0.1)
            if time.monotonic() - began > REPLACED_S:
                raise TimeoutError(f"not ready after {REPLACED_S:g} s")
        self.did[f"seconds of each {fault.kind}"] = max(self.did[f"seconds of each {fault.kind}"], round(time.monotonic() - began))  # fmt: skip


Found = TypeVar("Found")


async def until(condition: Callable[[], Found], why: Callable[[], str]) -> Found:
    end = time.monotonic() + REPLACED_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{why()}, for {REPLACED_S:g} s")
        await asyncio.sleep(0.2)
    return found


def soak_faults(server: Served, engines: int, seconds: float, clients: int, seed: int) -> tuple[soak.Round, list[str], str]:  # fmt: skip
    """The result of one run: requests, errors, and memory as text."""
    made: list[FaultSoak] = []

    def make(expected: soak.Alone, seconds: float, seed: int) -> FaultSoak:
        made.append(FaultSoak(server.url, expected, engines, members, seconds, seed))
        return made[-1]

    def members() -> list[int]:
        return running(server.process.pid, ENGINE, RANK)

    shared, lengths = set(os.listdir("/dev/shm")), (min(30, seconds / 3), seconds)
    run, wrong, words = soak.rounds(
        server, lambda: soak.alone(server), make, clients, lengths, seed, SPARE_MIB
    )
    deaths = sum(one.deaths for one in made)
    if (restarts := server.metric("quire:process_restarts_total", 'process="engine"')) != deaths:
        wrong.append(f"{deaths} engines were killed or stopped, and {restarts:.0f} restarted")
    if new := set(os.listdir("/dev/shm")) - shared:
        wrong.append(f"/dev/shm has {new}")
    return run, wrong, words


def soak_layout(name: str, given: argparse.Namespace, flags: list[str]) -> int:
    """The exit status for one layout."""
    layout = LAYOUTS[name]
    engines = 2 if "--data-parallel-size" in layout else 1
    with tempfile.TemporaryDirectory() as temporary:
        env = {"TMPDIR": temporary, "QUIRE_MAX_ENGINE_RESTARTS": "10000"}
        with Served(soak.MODEL, *FLAGS, *layout, *flags, env=env) as server:
            run, wrong, words = soak_faults(server, engines, given.seconds, given.clients, given.seed)  # fmt: skip
            pids = family(server.process.pid)
        if alive := left(pids):
            wrong.append(f"the processes {alive} are left")
        if files := os.listdir(temporary):
            wrong.append(f"the files {files} are left")
    print(f"{name}: ", end="")
    return soak.verdict((run, wrong, words), server.lines, (" CRITICAL", "never retrieved"))


def main() -> int:
    given, flags = soak.options(__doc__, 120)
    names = [word for word in flags if word in LAYOUTS] or list(LAYOUTS)
    flags = [word for word in flags if word not in LAYOUTS]
    return max([soak_layout(name, given, flags) for name in names])


if __name__ == "__main__":
    sys.exit(main())
