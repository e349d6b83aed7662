"""The prompts of a load, random or from a file. The same seed gives the same prompts.

Knows texts, and how to cut one to a number of tokens with the available tokenizer: a local one, the server's, or
none. Downloads no datasets. Does not know how prompts are sent.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quire.bench.serve.endpoints import BenchPrompt
from quire.bench.serve.http_client import HttpFailed, HttpTarget
from quire.bench.serve.sound import random_sounds, sounds_of
from quire.errors import ConfigError


class Cutter(Protocol):
    """Converts text to tokens and back."""

    name: str

    async def encode(self, text: str, special: bool = False) -> list[Any]: ...

    async def decode(self, tokens: list[Any]) -> str: ...


class LocalCutter:
    """A tokenizer on this machine."""

    def __init__(self, tokenizer: Any, name: str):
        self.tokenizer, self.name = tokenizer, name

    @classmethod
    def load(cls, name: str, trust_remote_code: bool = False) -> LocalCutter:
        """Load by directory, hub id or name of an embedded model. Raises ModelNotFound."""
        from quire.config.load import LoadConfig
        from quire.config.model import ModelConfig
        from quire.frontend.tokenizer import load
        from quire.models.checkpoint_locator import locate

        folder = name if Path(name).is_dir() else locate(ModelConfig(model=name), LoadConfig())
        return cls(load(folder, trust_remote_code=trust_remote_code), name)

    async def encode(self, text: str, special: bool = False) -> list[Any]:
        return list(self.tokenizer.encode(text, special))

    async def decode(self, tokens: list[Any]) -> str:
        return self.tokenizer.decode(tokens)


class ServerCutter:
    """The server's /tokenize and /detokenize, which vLLM and Quire have."""

    def __init__(self, server: HttpTarget, model: str):
        self.server, self.model, self.name = server, model, "the server's"

    async def encode(self, text: str, special: bool = False) -> list[Any]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        return list((await self.server.json("POST", "/tokenize", body, timeout=60))["tokens"])

    async def decode(self, tokens: list[Any]) -> str:
        body = {"model": self.model, "tokens": tokens}
        return str((await self.server.json("POST", "/detokenize", body, timeout=60))["prompt"])


class WordCutter:
    """Without a tokenizer: counts each word as a token. Results use the server's token counts where it reports them."""

    name = "none: one word per token"

    async def encode(self, text: str, special: bool = False) -> list[Any]:
        return text.split(" ") if text else []

    async def decode(self, tokens: list[Any]) -> str:
        return " ".join(tokens)


async def cutter(server: HttpTarget, model: str, tokenizer: str | None, trust: bool) -> Cutter:
    """The named tokenizer; else the server's, if it has one; else words."""
    if tokenizer:
        return LocalCutter.load(tokenizer, trust)
    remote = ServerCutter(server, model)
    try:
        if await remote.decode(await remote.encode("a b")):
            return remote
    except (HttpFailed, KeyError, TypeError):
        pass
    return WordCutter()


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Requirements for the prompts. Lengths in tokens."""

    dataset: str
    count: int
    seed: int
    path: Path | None = None
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    prefixes: int = 10
    suffix_len: int = 256
    fixed_output: int | None = None  # output length that overrides the lengths in a file
    shuffle: bool = True
    sound_s: float = 0.0  # seconds of sound, for prompts that are sound


async def make(options: DatasetOptions, cut: Cutter) -> list[BenchPrompt]:
    """Make `wanted.count` prompts.

    Raises:
        ConfigError: an unknown dataset, or a file that is missing or malformed.
    """
    if options.count < 1:
        raise ConfigError(f"--num-prompts {options.count}: must be at least 1")
    if options.sound_s:
        return _sounds(options)
    maker = DATASETS.get(options.dataset)
    if maker is None:
        raise ConfigError(
            f"--dataset-name {options.dataset}: choose from {', '.join(DATASETS)}; for prompts of a file use"
            " --dataset-name custom --dataset-path FILE.jsonl"
        )
    return await maker(options, cut)


def _sounds(options: DatasetOptions) -> list[BenchPrompt]:
    """Raises ConfigError: the dataset has no sound."""
    if options.path is not None:
        return sounds_of(options.path, options.count, options.seed, options.shuffle)
    if options.dataset != "random":
        raise ConfigError(f"--dataset-name {options.dataset} has no sound: use random, or --dataset-path FOLDER")  # fmt: skip
    return random_sounds(options.count, options.sound_s, options.range_ratio, options.seed)


async def _random(options: DatasetOptions, cut: Cutter) -> list[BenchPrompt]:
    draw = random.Random(options.seed)
    special = len(await cut.encode("", True)) if not isinstance(cut, ServerCutter) else 0
    prefix = await _text(draw, options.prefix_len, cut)
    between = " " if prefix else ""

    async def one(seed: int, length: int, output: int) -> BenchPrompt:
        text = await _text(random.Random(seed), length, cut)
        return BenchPrompt(prefix + between + text, options.prefix_len + length + special, output)

    sizes = [
        (
            draw.getrandbits(62),
            max(1, _around(draw, options.input_len, options.range_ratio) - special),
            max(1, _around(draw, options.output_len, options.range_ratio)),
        )
        for _ in range(options.count)
    ]
    return await _several([lambda size=size: one(*size) for size in sizes])  # type: ignore[misc]


async def _prefixes(options: DatasetOptions, cut: Cutter) -> list[BenchPrompt]:
    """A few long prefixes, each with many suffixes: tests the prefix cache."""
    draw = random.Random(options.seed)
    heads = [await _text(draw, options.prefix_len, cut) for _ in range(max(1, options.prefixes))]

    async def one(seed: int, head: str) -> BenchPrompt:
        tail = await _text(random.Random(seed), options.suffix_len, cut)
        return BenchPrompt(
            f"{head} {tail}", options.prefix_len + options.suffix_len, options.output_len
        )

    pairs = [(draw.getrandbits(62), heads[index % len(heads)]) for index in range(options.count)]
    if options.shuffle:
        draw.shuffle(pairs)
    return await _several([lambda pair=pair: one(*pair) for pair in pairs])  # type: ignore[misc]


def _around(draw: random.Random, length: int, ratio: float) -> int:
    return draw.randint(int(length * (1 - ratio)), int(length * (1 + ratio)))


async def _text(draw: random.Random, length: int, cut: Cutter) -> str:
    """A text of random words, `length` tokens long."""
    if length <= 0:
        return ""
    tokens: list[Any] = []
    words = ""
    while len(tokens) < length:
        words += " ".join(_word(draw) for _ in range(length - len(tokens) + 1)) + " "
        tokens = await cut.encode(words.rstrip())
    return await cut.decode(tokens[:length])


def _word(draw: random.Random) -> str:
    """A pronounceable word, short enough to be few tokens."""
    return "".join(
        draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(draw.randint(1, 3))
    )


async def _several(makers: list[Callable[[], Awaitable[BenchPrompt]]]) -> list[BenchPrompt]:
    """Run the makers, 16 at a time since they may call the server; results in order."""
    lock = asyncio.Semaphore(16)

    async def one(make: Callable[[], Awaitable[BenchPrompt]]) -> BenchPrompt:
        async with lock:
            return await make()

    return list(await asyncio.gather(*map(one, makers)))


async def _custom(options: DatasetOptions, cut: Cutter) -> list[BenchPrompt]:
    """JSON lines with `prompt`, and optionally `output_tokens`, the length of the answer."""
    rows: list[tuple[str, int | None]] = []
    for number, line in enumerate(_read(options).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append((str(row["prompt"]), row.get("output_tokens")))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f'{options.path}, line {number}: must be an object with "prompt"'
            ) from None
    return await _from_file(options, cut, rows)


async def _sharegpt(options: DatasetOptions, cut: Cutter) -> list[BenchPrompt]:
    """A ShareGPT file: the first two turns of each conversation are a prompt and its answer."""
    rows: list[tuple[str, int | None]] = []
    try:
        for talk in json.loads(_read(options)):
            turns = talk.get("conversations") or []
            if len(turns) >= 2:
                rows.append((turns[0]["value"], len(await cut.encode(turns[1]["value"])) or 1))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{options.path}: not a ShareGPT file") from None
    return await _from_file(options, cut, rows)


def _read(options: DatasetOptions) -> str:
    if options.path is None:
        raise ConfigError(f"--dataset-name {options.dataset}: --dataset-path is required")
    try:
        return options.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"--dataset-path {options.path}: {why}") from None


async def _from_file(
    options: DatasetOptions, cut: Cutter, rows: list[tuple[str, int | None]]
) -> list[BenchPrompt]:
    if not rows:
        raise ConfigError(f"--dataset-path {options.path}: the file has no prompts")
    if options.shuffle:
        random.Random(options.seed).shuffle(rows)
    rows = [rows[index % len(rows)] for index in range(options.count)]
    default = options.output_len
    return [
        BenchPrompt(
            text, len(await cut.encode(text, True)), options.fixed_output or said or default
        )
        for text, said in rows
    ]


DATASETS: dict[str, Callable[[DatasetOptions, Cutter], Awaitable[list[BenchPrompt]]]] = {
    "random": _random,
    "prefix_repetition": _prefixes,
    "custom": _custom,
    "sharegpt": _sharegpt,
}
