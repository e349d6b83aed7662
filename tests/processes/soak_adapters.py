"""Two minutes of adapters on a server with two HTTP processes: `python tests/processes/soak_adapters.py [--seconds N]`.

Twelve names are loaded, reloaded in place with other weights, and unloaded, with four places in memory and four adapters a
step, while clients send requests to them and to the base, and load adapters that are damaged. An answer must have the tokens of
one of the contents that its name had meanwhile, which were recorded with nothing beside; an unloaded name is a 404. At the end
nothing runs, and memory, files and threads are as before. Prints what it did; exit status 1 if anything is not so.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import soak
import torch
from safetensors.torch import save_file
from server_process import Served

from quire.models.checkpoint_locator import EMBEDDED

FLAGS = ("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "4", "--max-lora-rank", "16", "--max-num-seqs", "16",
         "--kv-cache-memory-bytes", "6M", "--max-model-len", "256", "--api-server-count", "2")  # fmt: skip
ENV = {"QUIRE_ALLOW_RUNTIME_LORA_UPDATING": "1"}
NAMES = [f"adapter-{number}" for number in range(12)]
CONTENTS = 16
PROMPTS = ("Tell me about the sea.", "Once upon a time, a red door", "numbers: 1 2 3")
LENGTH = 12
KINDS = {
    "base": 3,
    "ask": 12,
    "load": 2,
    "reload": 2,
    "unload": 1,
    "hang up": 2,
    "bad": 1,
    "list": 1,
}
BASE = "base"


def write_adapter(folder: Path, rank: int, seed: int) -> None:
    """A random adapter of the embedded model."""
    config = json.loads((EMBEDDED / soak.MODEL / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "mlp.down_proj": (inner, hidden),
    }
    draw, made = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for module, (ins, outs) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            made[name + "A.weight"] = torch.randn(rank, ins, generator=draw) * ins**-0.5
            made[name + "B.weight"] = torch.randn(outs, rank, generator=draw) * 0.3
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def body(model: str, prompt: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "return_token_ids": True}  # fmt: skip


Expected = dict[tuple[str, str], list[int]]
"""(content, prompt) -> tokens."""


class AdapterSoak:
    """Clients that ask, load, reload, unload and hang up until the time is over."""

    def __init__(self, url: str, folder: Path, expected: Expected, seconds: float, seed: int):
        self.url, self.folder, self.expected = url, folder, expected
        self.end = time.monotonic() + seconds
        self.draw = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.wrong: list[str] = []
        # By name: the contents that it may have, after each change; "": not loaded.
        self.history: dict[str, list[set[str]]] = {name: [{""}] for name in NAMES}
        self.locks = {name: asyncio.Lock() for name in NAMES}

    async def run(self, clients: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=soak.PATIENCE_S, limits=limits
        ) as http:
            await asyncio.gather(*(self.client(http) for _ in range(clients)))
            for name in NAMES:
                await self.unload(http, name)

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            what, name = (
                self.draw.choices(list(KINDS), list(KINDS.values()))[0],
                self.draw.choice(NAMES),
            )
            self.did[what] += 1
            try:
                match what:
                    case "base":
                        await self.ask(http, soak.MODEL)
                    case "ask":
                        await self.ask(http, name)
                    case "load" | "reload":
                        await self.load(http, name, what == "reload")
                    case "unload":
                        await self.unload(http, name)
                    case "hang up":
                        await self.hang_up(http, name)
                    case "bad":
                        await self.bad(http)
                    case "list":
                        await self.listed(http)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.wrong.append(f"{what} {name}: {type(error).__name__}: {error}")

    async def ask(self, http: httpx.AsyncClient, name: str) -> None:
        prompt = self.draw.choice(PROMPTS)
        history = self.history.get(name, [{BASE}])
        first = len(history) - 1
        answer = await http.post(soak.TEXT, json=body(name, prompt))
        contents = set().union(
            *history[first:]
        )  # those that it had while the request was under way
        if answer.status_code == 404 and "" in contents:
            self.did["404"] += 1
            return
        if answer.status_code != 200:
            self.wrong.append(f"{name}, {contents}: {answer.status_code} {answer.text[:300]}")
            return
        tokens = answer.json()["choices"][0]["token_ids"]
        self.did["tokens"] += len(tokens)
        if tokens not in [self.expected[content, prompt] for content in contents if content]:
            whose = [
                content
                for (content, asked), found in self.expected.items()
                if asked == prompt and found == tokens
            ]
            self.wrong.append(f"{name} {prompt!r}: {tokens} of {whose}, not of {contents}")

    async def load(self, http: httpx.AsyncClient, name: str, inplace: bool) -> None:
        async with self.locks[name]:
            content, history = f"content-{self.draw.randrange(CONTENTS)}", self.history[name]
            (was,) = history[-1]
            history.append({was, content})
            fields = {
                "lora_name": name,
                "lora_path": str(self.folder / content),
                "load_inplace": inplace,
            }
            answer = await http.post("/v1/load_lora_adapter", json=fields)
            refused = bool(was) and not inplace
            history.append({was if refused else content})
            self.did["loaded"] += not refused
            if answer.status_code != (400 if refused else 200):
                self.wrong.append(f"loading {name}: {answer.status_code} {answer.text[:300]}")

    async def unload(self, http: httpx.AsyncClient, name: str) -> None:
        async with self.locks[name]:
            history = self.history[name]
            (was,) = history[-1]
            history.append({was, ""})
            answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
            history.append({""})
            if answer.status_code != (200 if was else 404):
                self.wrong.append(f"unloading {name}: {answer.status_code} {answer.text[:300]}")

    async def hang_up(self, http: httpx.AsyncClient, name: str) -> None:
        asked = body(name, self.draw.choice(PROMPTS)) | {"stream": True, "max_tokens": 60}
        try:
            async with asyncio.timeout(self.draw.random() * 0.5), http.stream("POST", soak.TEXT, json=asked) as answer:  # fmt: skip
                async for _ in answer.aiter_lines():
                    pass
        except TimeoutError:
            self.did["hung up"] += 1

    async def bad(self, http: httpx.AsyncClient) -> None:
        path = self.folder / self.draw.choice(("truncated", "missing", "wrong"))
        answer = await http.post(
            "/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(path)}
        )
        if answer.status_code not in (400, 404):
            self.wrong.append(f"loading {path.name}: {answer.status_code} {answer.text[:300]}")

    async def listed(self, http: httpx.AsyncClient) -> None:
        cards = {card["id"] for card in (await http.get("/v1/models")).json()["data"]}
        if soak.MODEL not in cards or "bad" in cards:
            self.wrong.append(f"/v1/models lists {cards}")


def prepare(folder: Path) -> None:
    """The adapters, and some that cannot be loaded."""
    for number in range(CONTENTS):
        write_adapter(folder / f"content-{number}", (1, 4, 8, 16)[number % 4], number)
    write_adapter(folder / "truncated", 4, 99)
    file = folder / "truncated" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    write_adapter(folder / "wrong", 32, 98)


def recorded(server: Served, folder: Path) -> Expected:
    """The answers of every content, with nothing beside."""
    found = {(BASE, prompt): tokens(server, soak.MODEL, prompt) for prompt in PROMPTS}
    for number in range(CONTENTS):
        content = f"content-{number}"
        fields = {"lora_name": "alone", "lora_path": str(folder / content), "load_inplace": True}
        server.client.post("/v1/load_lora_adapter", json=fields).raise_for_status()
        found |= {(content, prompt): tokens(server, "alone", prompt) for prompt in PROMPTS}
    server.client.post("/v1/unload_lora_adapter", json={"lora_name": "alone"}).raise_for_status()
    return found


def tokens(server: Served, model: str, prompt: str) -> list[int]:
    return list(server.post(soak.TEXT, **body(model, prompt))["choices"][0]["token_ids"])


def soak_adapters(
    server: Served, folder: Path, seconds: float, clients: int, seed: int
) -> tuple[soak.Round, list[str], str]:
    """The result of one run: requests, errors, and memory as text."""

    def make(expected: Expected, seconds: float, seed: int) -> AdapterSoak:
        return AdapterSoak(server.url, folder, expected, seconds, seed)

    lengths = min(30, seconds / 3), seconds
    return soak.rounds(server, lambda: recorded(server, folder), make, clients, lengths, seed)


def main() -> int:
    given, flags = soak.options(__doc__, 120)
    with tempfile.TemporaryDirectory() as made:
        prepare(folder := Path(made))
        with Served(soak.MODEL, *FLAGS, *flags, env=ENV) as server:
            found = soak_adapters(server, folder, given.seconds, given.clients, given.seed)
            lines = server.lines
    return soak.verdict(found, lines)


if __name__ == "__main__":
    sys.exit(main())
