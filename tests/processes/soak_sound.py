"""Two minutes of a random mixture on a server of a model that hears: `python tests/processes/soak_sound.py`.

A tiny Qwen2-Audio: chats with sounds of four formats and with text only, streams, hang-ups at any moment, damaged files, half
requests, broken bytes, wrong parts. Every answer must have the tokens that its sounds had alone. At the end nothing runs, and
memory, files, threads and processes are as before. Prints what it did; exit status 1 if anything is not so.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "media"))

import httpx
import soak
import soundfile
from audio_checkpoints import RATE, make_checkpoint, sound
from server_process import Served
from vision_checkpoints import damaged

KIND, CHAT = "qwen2_audio", soak.CHAT
FLAGS = (
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "8",
    "--kv-cache-memory-bytes",
    "8M",
)
KINDS = {"whole": 6, "stream": 4, "hang up": 3, "damaged": 4, "half": 1, "noise": 1, "wrong": 2}  # fmt: skip
TOKENS = 12
ARENAS_MIB = 48
"""As of `soak_pooling.py`: threads that decode base64 and fetch take their share of the heap in the first round."""


def encoded(kind: str, subtype: str, seed: int, seconds: float, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound(seed, seconds, rate), rate, format=kind, subtype=subtype)
    return file.getvalue()


FILES = {
    "wav": encoded("WAV", "PCM_16", 1, 1.3), "wav24": encoded("WAV", "PCM_24", 2, 0.4, 8000),
    "flac": encoded("FLAC", "PCM_16", 3, 0.9), "ogg": encoded("OGG", "VORBIS", 4, 0.7, 44_100),
    "opus": encoded("OGG", "OPUS", 5, 0.6, 48_000), "mp3": encoded("MP3", "MPEG_LAYER_III", 6, 0.8),
}  # fmt: skip
TALKS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in FILES}, "two": ("wav", "flac"), "again": ("ogg", "ogg"), "text": (),
}  # fmt: skip
WRONG: list[Any] = [
    {"type": "input_audio", "input_audio": {"data": "@@@"}}, {"type": "input_audio", "input_audio": {"data": ""}},
    {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/x"}}, {"type": "audio_url", "audio_url": 7},
    {"type": "input_audio", "input_audio": {"data": base64.b64encode(encoded("FLAC", "PCM_16", 7, 9.0)).decode()}},
    {"type": "input_audio", "input_audio": {"data": base64.b64encode(encoded("WAV", "PCM_16", 7, 0.0)).decode()}},
]  # fmt: skip


def part(file: bytes) -> dict[str, Any]:
    data = base64.b64encode(file).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def asked(parts: list[Any], stream: bool = False) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {
        "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": stream, "return_token_ids": True,
    }  # fmt: skip


def talk(name: str, stream: bool = False) -> dict[str, Any]:
    return asked([part(FILES[file]) for file in TALKS[name]], stream)


def alone(server: Served) -> dict[str, list[int]]:
    """The tokens of each conversation, with nothing beside it."""
    return {name: server.post(CHAT, **talk(name))["choices"][0]["token_ids"] for name in TALKS}


class SoundSoak(soak.Soak):
    """Clients that send sound, hang up and send nonsense until the time is over."""

    expected: dict[str, list[int]]  # type: ignore[assignment]

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            what = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
            name = self.draw.choice(list(TALKS))
            self.did[what] += 1
            try:
                match what:
                    case "whole":
                        answer = await http.post(CHAT, json=talk(name))
                        self.compare(name, answer.json()["choices"][0]["token_ids"])
                    case "stream":
                        await self.stream(http, name)
                    case "hang up":
                        await self.leave(http, name)
                    case "damaged":
                        await self.damaged(http, self.draw.choice(list(FILES)))
                    case "half":
                        await self.half(CHAT, "hello")
                    case "noise":
                        await self.noise(CHAT, "hello")
                    case "wrong":
                        await self.refused(http, self.draw.choice(WRONG))
            except (httpx.HTTPError, KeyError, ValueError, IndexError) as error:
                self.wrong.append(f"{what} {name}: {type(error).__name__}: {error}")

    def compare(self, name: str, tokens: list[int]) -> None:
        self.did["tokens"] += len(tokens)
        if tokens != self.expected[name]:
            self.wrong.append(f"{name}: {tokens}, and alone {self.expected[name]}")

    async def stream(self, http: httpx.AsyncClient, name: str) -> None:
        tokens: list[int] = []
        async with http.stream("POST", CHAT, json=talk(name, stream=True)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or []
        self.compare(name, tokens)

    async def leave(self, http: httpx.AsyncClient, name: str) -> None:
        try:
            async with asyncio.timeout(self.draw.random() * 0.3):
                await http.post(CHAT, json=talk(name, stream=self.draw.random() < 0.5))
        except TimeoutError:
            self.did["hung up"] += 1

    async def damaged(self, http: httpx.AsyncClient, name: str) -> None:
        """Read or refused, and nothing else."""
        file = damaged(FILES[name], self.draw)
        answer = await http.post(CHAT, json=asked([part(file)]) | {"max_tokens": 1})
        self.did[f"damaged, {answer.status_code}"] += 1
        if answer.status_code not in (200, 400):
            self.wrong.append(f"damaged {name}: {answer.status_code} {answer.text[:200]}")

    async def refused(self, http: httpx.AsyncClient, wrong: Any) -> None:
        answer = await http.post(CHAT, json=asked([wrong]))
        if answer.status_code != 400 or not answer.json()["error"]["param"].startswith("messages[0].content[0]"):  # fmt: skip
            self.wrong.append(f"{str(wrong)[:100]}: {answer.status_code} {answer.text[:200]}")


def soak_sound(server: Served, seconds: float, clients: int, seed: int) -> tuple[soak.Round, list[str], str]:  # fmt: skip
    """The result of one run: requests, errors, and memory as text."""

    def make(expected: Any, seconds: float, seed: int) -> SoundSoak:
        return SoundSoak(server.url, expected, seconds, seed)

    lengths = min(60, seconds), seconds
    return soak.rounds(server, lambda: alone(server), make, clients, lengths, seed, ARENAS_MIB)


def main() -> int:
    given, flags = soak.options(__doc__, 120)
    with (
        tempfile.TemporaryDirectory() as folder,
        Served(make_checkpoint(KIND, Path(folder)), *FLAGS, *flags) as server,
    ):
        found = soak_sound(server, given.seconds, given.clients, given.seed)
        lines = server.lines
    return soak.verdict(found, lines, ("Traceback", " CRITICAL ", " ERROR "))


if __name__ == "__main__":
    sys.exit(main())
