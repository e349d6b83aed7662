"""What the soaks of sound and of pictures share: clients that send files, texts and nonsense to a server of a tiny model.

Chats with files and with text only, streams, hang-ups at any moment, damaged files, half requests, broken bytes, wrong parts. Every
answer must have the tokens that its files had alone. At the end nothing runs, and memory, files, threads and processes are as
before.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "media"))

import httpx
import soak
from server_process import Served
from vision_checkpoints import damaged

CHAT = soak.CHAT
FLAGS = (
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "8",
    "--kv-cache-memory-bytes",
    "8M",
    "--mm-processor-cache-gb",  # damaged pictures that can be read fill its usual 4 GiB for minutes
    "0.03",
)
KINDS = {"whole": 6, "stream": 4, "hang up": 3, "damaged": 4, "half": 1, "noise": 1, "wrong": 2}  # fmt: skip
TOKENS = 12
ARENAS_MIB = 48
"""As of `soak_pooling.py`: threads that decode base64 and fetch take their share of the heap in the first round."""


@dataclass
class Medium:
    """
    Attributes:
        files: by name. talks: by name, the files of a conversation. part: of a message, with a file. wrong: parts that are refused.
        make_checkpoint: writes the model into a folder, and returns its path.
    """

    files: Mapping[str, bytes]
    talks: Mapping[str, Sequence[str]]
    part: Callable[[bytes], dict[str, Any]]
    wrong: Sequence[Any]
    make_checkpoint: Callable[[Path], str]

    def talk(self, name: str, stream: bool = False) -> dict[str, Any]:
        """The request of a conversation."""
        return asked([self.part(self.files[file]) for file in self.talks[name]], stream)

    def alone(self, server: Served) -> dict[str, list[int]]:
        """The tokens of each conversation, with nothing beside it."""
        return {name: server.post(CHAT, **self.talk(name))["choices"][0]["token_ids"] for name in self.talks}  # fmt: skip


def asked(parts: list[Any], stream: bool = False) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {
        "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": stream, "return_token_ids": True,
    }  # fmt: skip


class MediaSoak(soak.Soak):
    """Clients that send files, hang up and send nonsense until the time is over."""

    expected: dict[str, list[int]]  # type: ignore[assignment]

    def __init__(self, medium: Medium, *args: Any):
        super().__init__(*args)
        self.medium = medium

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            what = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
            name = self.draw.choice(list(self.medium.talks))
            self.did[what] += 1
            try:
                match what:
                    case "whole":
                        answer = await http.post(CHAT, json=self.medium.talk(name))
                        self.compare(name, answer.json()["choices"][0]["token_ids"])
                    case "stream":
                        await self.stream(http, name)
                    case "hang up":
                        await self.leave(http, name)
                    case "damaged":
                        await self.damaged(http, self.draw.choice(list(self.medium.files)))
                    case "half":
                        await self.half(CHAT, "hello")
                    case "noise":
                        await self.noise(CHAT, "hello")
                    case "wrong":
                        await self.refused(http, self.draw.choice(self.medium.wrong))
            except (httpx.HTTPError, KeyError, ValueError, IndexError) as error:
                self.wrong.append(f"{what} {name}: {type(error).__name__}: {error}")

    def compare(self, name: str, tokens: list[int]) -> None:
        self.did["tokens"] += len(tokens)
        if tokens != self.expected[name]:
            self.wrong.append(f"{name}: {tokens}, and alone {self.expected[name]}")

    async def stream(self, http: httpx.AsyncClient, name: str) -> None:
        tokens: list[int] = []
        async with http.stream("POST", CHAT, json=self.medium.talk(name, stream=True)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or []
        self.compare(name, tokens)

    async def leave(self, http: httpx.AsyncClient, name: str) -> None:
        try:
            async with asyncio.timeout(self.draw.random() * 0.3):
                await http.post(CHAT, json=self.medium.talk(name, stream=self.draw.random() < 0.5))
        except TimeoutError:
            self.did["hung up"] += 1

    async def damaged(self, http: httpx.AsyncClient, name: str) -> None:
        """Read or refused, and nothing else."""
        file = damaged(self.medium.files[name], self.draw)
        answer = await http.post(CHAT, json=asked([self.medium.part(file)]) | {"max_tokens": 1})
        self.did[f"damaged, {answer.status_code}"] += 1
        if answer.status_code not in (200, 400):
            self.wrong.append(f"damaged {name}: {answer.status_code} {answer.text[:200]}")

    async def refused(self, http: httpx.AsyncClient, wrong: Any) -> None:
        answer = await http.post(CHAT, json=asked([wrong]))
        if answer.status_code != 400 or not answer.json()["error"]["param"].startswith("messages[0].content[0]"):  # fmt: skip
            self.wrong.append(f"{str(wrong)[:100]}: {answer.status_code} {answer.text[:200]}")


def soak_media(medium: Medium, server: Served, seconds: float, clients: int, seed: int) -> tuple[soak.Round, list[str], str]:  # fmt: skip
    """The result of one run: requests, errors, and memory as text."""

    def make(expected: Any, seconds: float, seed: int) -> MediaSoak:
        return MediaSoak(medium, server.url, expected, seconds, seed)

    lengths = min(60, seconds), seconds
    return soak.rounds(server, lambda: medium.alone(server), make, clients, lengths, seed, ARENAS_MIB)  # fmt: skip


def main(medium: Medium, about: str | None) -> int:
    """Of a program: two minutes, if the command line does not say."""
    given, flags = soak.options(about, 120)
    with (
        tempfile.TemporaryDirectory() as folder,
        Served(medium.make_checkpoint(Path(folder)), *FLAGS, *flags) as server,
    ):
        found = soak_media(medium, server, given.seconds, given.clients, given.seed)
        lines = server.lines
    return soak.verdict(found, lines, ("Traceback", " CRITICAL ", " ERROR "))
