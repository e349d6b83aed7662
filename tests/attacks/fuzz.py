"""Sends thousands of bodies to every POST route of a server: `python tests/attacks/fuzz.py --bodies 10000 --seed 1`.

Bodies are generated and mutated (`tests/server/malformed_requests.py`), have extreme values in every field, or in pairs of fields.
Each must be answered in time; the only 5xx is the 503 of a limit; the engine is
not replaced; normal requests among and after them get the same tokens. Prints the statuses; exit status 1 on any
violation.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).parent))

import httpx
import malformed_requests
from attacked_server import INNOCENT, TEXT, AttackedServer, only_this_machine

from quire.server.openapi import BODIES

CLIENTS = 8
ANSWERED_S = 240.0  # eight answers of 2,048 tokens in float32 take more than a minute on two cores
MOST_TOKENS = 64  # a body that requests more gets this limit: there are thousands of bodies
EXTREMES: list[Any] = [
    None, True, False, 0, -0.0, 1, -1, 0.5, 2, 127, 128, 129, 1 << 31, -(1 << 31), 1 << 32, 1 << 53, 1 << 63, -(1 << 63),
    1 << 64, 10**35, -(10**35), 1e-308, 1e308, -1e308, 5e-324, "", " ", "\x00", "\ud800", "a" * 300, "x" * 70_000, "1", "[1]",
    [], [[]], [0] * 200, [1 << 40], ["a"] * 20, ["a" * 2000], {}, {"0": 1}, {"a": {"a": {"a": []}}}, {"type": "object"},
    {"type": "json_object"}, {"regex": "(a{99}){99}"}, {"a": 10**35}, {"99999999": 100}, {"1": 1e308},
]  # fmt: skip
CREATES = ("n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
Body = tuple[str, bytes]


def bodies(seed: int, count: int) -> Iterator[Body]:
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.random()
        if kind < 0.4:
            path, good = draw.choice(malformed_requests.GOOD)
            yield path, malformed_requests.body(draw, path, good)
        elif kind < 0.65:
            yield extreme(draw, 1)
        elif kind < 0.9:
            yield extreme(draw, 2)  # pairs may pass where each alone is refused
        elif kind < 0.96:
            yield (
                draw.choice(sorted(BODIES)),
                json.dumps(malformed_requests.anything(draw)).encode(),
            )
        else:
            yield draw.choice(sorted(BODIES)), draw.choice(malformed_requests.RAW)


def extreme(draw: random.Random, fields: int) -> Body:
    path, good = draw.choice(malformed_requests.GOOD)
    found: dict[str, Any] = copy.deepcopy(good)
    for name in draw.sample(malformed_requests.names(path), fields):
        found[name] = plausible(draw, name) if draw.random() < 0.75 else copy.deepcopy(draw.choice(EXTREMES))  # fmt: skip
    return path, json.dumps(found).encode()


def plausible(draw: random.Random, name: str) -> Any:
    """A valid value for this field, so that a pair of fields gets past validation."""
    known: dict[str, list[Any]] = {
        "n": [2, 3], "best_of": [2, 4], "temperature": [0, 1, 2], "top_p": [0.5, 1], "top_k": [-1, 1, 5], "min_p": [0.1],
        "seed": [0, (1 << 63) - 1], "logprobs": [0, 2, True], "top_logprobs": [0, 2], "prompt_logprobs": [0, 2], "echo": [True],
        "logprob_token_ids": [[1, 2, 3], [5]], "stop": ["a", ["b", "c"]], "stop_token_ids": [[5, 6]], "bad_words": [["the"]],
        "allowed_token_ids": [[5], [5, 6, 7]], "logit_bias": [{"5": 100}, {"5": -100}], "min_tokens": [1, 3], "stream": [True],
        "use_beam_search": [True], "length_penalty": [0, 2, -2], "ignore_eos": [True], "truncate_prompt_tokens": [1, 5, -1],
        "repetition_penalty": [0.5, 2], "presence_penalty": [-2, 2], "frequency_penalty": [-2, 2], "priority": [-1, 5],
        "structured_outputs": [{"regex": "ab+"}, {"choice": ["a", "b"]}, {"json": {"type": "integer"}}], "suffix": ["x"],
        "response_format": [{"type": "json_object"}, {"type": "text"}], "tool_choice": ["none", "auto", "required"],
        "tools": [[malformed_requests.TOOL]], "stream_options": [{"include_usage": True}], "timeout": [0.01, 5], "request_id": ["same"],
        "vllm_xargs": [{"a": 1}, {"a": [1.5, "b"]}], "return_token_ids": [True], "cache_salt": ["s"], "user": ["u"],
        "repetition_detection": [{"max_pattern_size": 2, "min_count": 3}], "thinking_token_budget": [0, 4],
        "add_special_tokens": [False], "add_generation_prompt": [False], "continue_final_message": [True],
        "chat_template_kwargs": [{"a": 1}], "documents": [[{"title": "a", "text": "b"}]], "prompt_embeds": ["AA=="],
    }  # fmt: skip
    return copy.deepcopy(draw.choice(known.get(name) or malformed_requests.ODD))


def short(raw: bytes) -> bytes:
    """The same body with a limit on its output: ten thousand of them run on two cores."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if not isinstance(found, dict) or not ("prompt" in found or "messages" in found or "input" in found):  # fmt: skip
        return raw
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = found.get(name)
        if isinstance(value, int) and MOST_TOKENS < value < 1 << 31:
            found[name] = MOST_TOKENS
    if not any(name in found for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")):  # fmt: skip
        found["max_tokens"] = 4
    try:
        return json.dumps(found).encode()
    except (ValueError, RecursionError):
        return raw


class Fuzz:
    """Clients that send bodies, and one that sends normal requests with known answers."""

    def __init__(self, server: AttackedServer, count: int, seed: int):
        self.server, self.todo = server, bodies(seed, count)
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.slowest, self.innocents, self.over = 0.0, 0, False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=ANSWERED_S, limits=limits) as http:  # fmt: skip
            innocent = asyncio.create_task(self.innocent(http))
            await asyncio.gather(*(self.client(http) for _ in range(CLIENTS)))
            self.over = True
            await innocent

    async def client(self, http: httpx.AsyncClient) -> None:
        head = {"Content-Type": "application/json"}
        for path, raw in self.todo:
            if len(self.wrong) > 20:
                return
            sent = short(raw)
            begun = time.monotonic()
            try:
                async with asyncio.timeout(ANSWERED_S):
                    answer = await http.post(path, content=sent, headers=head)
            except (TimeoutError, httpx.HTTPError) as error:
                self.wrong.append(f"{path} {sent[:600]!r}: {type(error).__name__}")
                continue
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self.statuses[answer.status_code] += 1
            fault = answer.status_code >= 500 and answer.status_code != 503
            if fault or re.search(r'"code": ?500\b', answer.text) or "Traceback" in answer.text:
                self.wrong.append(f"{path} {sent[:600]!r} got {answer.status_code}: {answer.text[:300]}")  # fmt: skip

    async def innocent(self, http: httpx.AsyncClient) -> None:
        while not self.over:
            try:
                answer = await http.post(TEXT, json=INNOCENT)
                tokens = json.dumps(answer.json()["choices"][0]["token_ids"])
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.wrong.append(f"an innocent request: {type(error).__name__}: {error}")
                return
            self.innocents += 1
            if tokens != self.server.expected:
                self.wrong.append(f"an innocent request got {tokens}")
            await asyncio.sleep(0.2)


def fuzz(server: AttackedServer, count: int, seed: int, seconds: float) -> Fuzz:
    """Send `count` bodies. `wrong` of the result lists the violations."""
    run = Fuzz(server, count, seed)
    with server.attack(seconds=seconds) as measured:
        asyncio.run(run.run())
    try:
        measured.check()
    except AssertionError as error:
        run.wrong.append(str(error))
    answered = sum(run.statuses.values())
    if not run.wrong and not (answered == count and run.statuses[200] > count / 10 and run.statuses[400] > count / 10):  # fmt: skip
        run.wrong.append(f"{answered} of {count} were answered: {dict(run.statuses)}")
    return run


def said(run: Fuzz) -> str:
    return f"{sum(run.statuses.values())} bodies: {dict(run.statuses)}, slowest {run.slowest:.1f} s, {run.innocents} innocent"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600)
    given, flags = parser.parse_known_args()
    with only_this_machine(), AttackedServer(*flags) as server:
        run = fuzz(server, given.bodies, given.seed, given.seconds)
    print(said(run))
    for line in run.wrong[:20]:
        print("WRONG:", line)
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
