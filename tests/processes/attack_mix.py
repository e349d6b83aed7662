"""Attacks of a few milliseconds to a second each, drawn among a soak's traffic; `tests/attacks` has the long ones.

Knows bytes and bodies. Does not know what is answered but that it is no 5xx, save the 503 of a limit: an attack may be
refused, answered or hung up on.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
KIB = 1 << 10
PRIMES = (999983, 999979, 999961, 999959, 999953)
PATIENCE_S = 120.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]


def grammar(draw: random.Random) -> dict[str, Any]:
    """One that takes long or much to compile; each is new."""
    new = "x" * draw.randrange(1, 400) + str(draw.randrange(10**6))
    schema = {"allOf": [{"type": "integer", "multipleOf": one} for one in draw.sample(PRIMES, 5)]}
    return draw.choice(
        [
            {"regex": "((((a{100}){100}){100}){100})" + new},
            {"regex": "(a{1000}){1000}" + new},
            {"regex": "(.{0,99}){0,99}" + new},
            {"regex": new * 200},
            {"grammar": f"start: A\nA: /(a{{1000}}){{1000}}{new}/\n"},
            {"grammar": "root ::= " + " | ".join(f'"{new}{number}"' for number in range(4000))},
            {"json": schema},
            {"json": {"type": "string", "pattern": "^((a{500}){500}){500}$" + new}},
            {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
            {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        ]
    )


def shuffled(draw: random.Random) -> str:
    letters = list("max_completion_tokens")
    draw.shuffle(letters)
    return "".join(letters)


def body(draw: random.Random) -> tuple[str, bytes]:
    """A request that costs more than it should, or that is refused for what it asks."""
    size = draw.choice((64 * KIB, 512 * KIB, 2048 * KIB))
    text = {"prompt": "a", "max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    long = "word " * 200
    path, found = draw.choice(
        [
            (TEXT, text | {"structured_outputs": grammar(draw)}),
            (TEXT, text | {"structured_outputs": grammar(draw)}),
            (TEXT, text | {shuffled(draw): 1 for _ in range(size // 200)}),
            (TEXT, text | {"stop": "ab" * (size // 2), "n": 3, "temperature": 1}),
            (TEXT, text | {"bad_words": ["a b" * (size // 3)]}),
            (TEXT, text | {"vllm_xargs": {"a": "x" * size}, "n": 8, "temperature": 1}),
            (TEXT, text | {"vllm_xargs": {"a": 10**35, "b": "x" * size}}),
            (TEXT, text | {"allowed_token_ids": [5] * (size // 4)}),
            (TEXT, text | {"prompt": "word " * (size // 5)}),
            (TEXT, text | {"prompt": [long] * 200, "prompt_logprobs": 20}),
            (TEXT, text | {"prompt": [long] * 3, "prompt_logprobs": 20}),
            (TEXT, text | {"prompt": ["a"] * 32, "n": 128, "max_tokens": 200, "logprobs": 20}),
            (TEXT, text | {"best_of": 2, "temperature": 1, "logprob_token_ids": [1, 2, 3]}),
            (TEXT, text | {"use_beam_search": True, "n": 16, "max_tokens": 20}),
            (TEXT, text | {"use_beam_search": True, "n": 2, "length_penalty": -1e308}),
            (CHAT, chat | {"chat_template_kwargs": {"a": ["x"] * (size // 5)}}),
            (CHAT, chat | {"messages": [{"role": "user", "content": "a"}] * (size // 40)}),
            ("/tokenize", {"prompt": "many words " * (size // 11)}),
            ("/detokenize", {"tokens": [65] * (size // 4)}),
            (TEXT, None),
        ]
    )
    if found is None:
        return path, b'{"prompt":"a","vllm_xargs":{"a":' + b"[" * size
    return path, json.dumps(found).encode()


async def asked(draw: random.Random, http: httpx.AsyncClient) -> str:
    """Sends one, and leaves in the middle of two of five. What is wrong; empty: nothing."""
    path, raw = body(draw)
    patience = draw.random() if draw.random() < 0.4 else PATIENCE_S
    head = {"Content-Type": "application/json"}
    try:
        async with asyncio.timeout(patience):
            answer = await http.post(path, content=raw, headers=head)
    except TimeoutError:
        return f"{path} {raw[:300]!r} got no answer in {PATIENCE_S:g} s" if patience == PATIENCE_S else ""  # fmt: skip
    except httpx.TransportError:
        return ""  # the server may close what is too large, or too slow
    if answer.status_code >= 500 and answer.status_code != 503:
        return f"{path} {raw[:300]!r} got {answer.status_code}: {answer.text[:200]}"
    return ""


async def poured(draw: random.Random, connect: Connect) -> None:
    """Bytes on a bare connection: a pipeline, a head or a chunk without end; perhaps its answers are not read."""
    start, piece = draw.choice(
        [
            (b"", b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200),
            (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200),
            (b"GET / HTTP/1.1\r\nX: ", b"a" * 65536),
            (b"GET /", b"a" * 65536),
            (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a" * 65536),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n"),
        ]
    )  # fmt: skip
    reader, writer = await connect()
    reading = asyncio.create_task(emptied(reader)) if draw.random() < 0.5 else None
    try:
        async with asyncio.timeout(2):
            writer.write(start)
            for _ in range(draw.choice((1, 10, 60))):
                writer.write(piece)
                await writer.drain()
            await asyncio.sleep(draw.random() * 0.3)
    except (TimeoutError, OSError):
        pass
    finally:
        writer.transport.abort()
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def emptied(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def unread(draw: random.Random, connect: Connect) -> None:
    """A large answer, streamed or whole, of which nothing is read until the client leaves."""
    asked = {"prompt": "a", "n": 8, "max_tokens": 100, "logprobs": 20, "ignore_eos": True, "temperature": 1}  # fmt: skip
    raw = json.dumps(asked | {"stream": draw.random() < 0.5}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    reader, writer = await connect()
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(head.encode() + raw)
    await asyncio.sleep(draw.random() * 5)
    writer.transport.abort()


async def silent(draw: random.Random, connect: Connect) -> None:
    """Connections that say nothing, or half of something, and stay a while."""
    held = [await connect() for _ in range(draw.choice((1, 5, 20)))]
    for _, writer in held:
        writer.write(draw.choice((b"", b"G", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")))  # fmt: skip
    await asyncio.sleep(draw.random() * 3)
    for _, writer in held:
        writer.transport.abort()
