"""No pooling request within the size limits holds the event loop for more than 100 ms, or keeps much memory."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable

import pytest
from conftest import Serving
from loop_monitor import LIMIT_S, MOST_BODY, Answer, Beats, longest_callback, many, send
from msgspec.structs import replace
from vector_engine import CLASSIFIES, EMBEDS, RANKS

from quire.protocol.pooling_info import PoolingInfo

GIL_LIMIT_S = 0.25  # lenient, as in tests/server/test_loop_holds.py
SMALL = 32 << 10
LONGEST = (4 << 20) - 100
"""Bytes of the longest text that may be truncated."""
EMBEDDINGS, POOLING, RERANK = "/v1/embeddings", "/pooling", "/v1/rerank"
TOKENS = replace(EMBEDS, tasks=["token_embed"])
MSG = b'{"role":"user","content":"ab"}'
WORDS = b'"%s"' % (b"ab" * 14)

Case = tuple[PoolingInfo, str, Callable[[int], bytes]]


def body(*parts: bytes) -> bytes:
    return b"{" + b",".join(parts) + b"}"


def texts(size: int, most: int = 2048) -> bytes:
    return many(WORDS, min(size, most * (len(WORDS) + 1) + 150))


def nested(size: int) -> bytes:
    return many(b"[" * 500 + b"]" * 500, size)


CASES: dict[str, Case] = {
    "texts": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + texts(n))),
    "texts-base64": (EMBEDS, EMBEDDINGS, lambda n: body(b'"encoding_format":"base64","input":' + texts(n))),
    "texts-bytes": (EMBEDS, EMBEDDINGS, lambda n: body(b'"encoding_format":"bytes_only","embed_dtype":"fp8_e4m3","input":' + texts(n))),
    "texts-long": (EMBEDS, EMBEDDINGS, lambda n: body(b'"truncate_prompt_tokens":-1,"input":' + many(b'"%s"' % (b"ab " * 60), min(n, 2048 * 183)))),
    "texts-too-many": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + many(b'"ab"', n))),
    "texts-empty": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + many(b'""', n))),
    "text-long": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":"%s"' % (b"ab " * (n // 3 - 60)))),
    "text-cut": (EMBEDS, EMBEDDINGS, lambda n: body(b'"truncate_prompt_tokens":-1,"input":"%s"' % (b"ab " * (n // 3 - 60)))),
    "text-cut-most": (EMBEDS, EMBEDDINGS, lambda n: body(b'"truncate_prompt_tokens":-1,"input":"%s"' % (b"a " * (min(n, LONGEST) // 2)))),
    "cohere-cut": (EMBEDS, "/v2/embed", lambda n: body(b'"truncate":"START","texts":["%s"]' % (b"a " * (min(n, LONGEST) // 2)))),
    "ids": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + many(b"5", n))),
    "ids-lists": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + many(many(b"5", 240), min(n, 2048 * 42)))),
    "ids-bad": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + many(many(b'"x"', 400), n))),
    "ids-large": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + many(many(b"5", n // 2048), n))),
    "deep": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + nested(n))),
    "deeper": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + b"[" * n)),
    "messages": (EMBEDS, EMBEDDINGS, lambda n: body(b'"messages":' + many(MSG, n))),
    "conversations": (EMBEDS, EMBEDDINGS, lambda n: body(b'"input":' + many(b"[%s]" % MSG, n))),
    "cohere-texts": (EMBEDS, "/v2/embed", lambda n: body(b'"embedding_types":["float","binary","ubinary","base64"],"texts":' + texts(n))),
    "cohere-inputs": (EMBEDS, "/v2/embed", lambda n: body(b'"inputs":' + many(b'{"content":[{"type":"text","text":"ab"}]}', n))),
    "cohere-parts": (EMBEDS, "/v2/embed", lambda n: body(b'"inputs":[{"content":' + many(b'{"type":"text","text":"ab"}', n) + b"}]")),
    "cohere-types": (EMBEDS, "/v2/embed", lambda n: body(b'"texts":["ab"],"embedding_types":' + many(b'"float"', n))),
    "rows": (TOKENS, POOLING, lambda n: body(b'"input":' + texts(n))),
    "rows-base64": (TOKENS, POOLING, lambda n: body(b'"encoding_format":"base64","input":' + texts(n))),
    "rows-bytes": (TOKENS, POOLING, lambda n: body(b'"encoding_format":"bytes_only","input":' + texts(n))),
    "classes": (CLASSIFIES, "/classify", lambda n: body(b'"input":' + texts(n))),
    "rerank": (RANKS, RERANK, lambda n: body(b'"query":"ab","documents":' + many(b'"abab"', min(n, 2048 * 7)))),
    "rerank-vectors": (EMBEDS, RERANK, lambda n: body(b'"query":"ab","documents":' + texts(n))),
    "rerank-late": (TOKENS, RERANK, lambda n: body(b'"query":"ababababab","documents":' + texts(n))),
    "rerank-too-many": (RANKS, RERANK, lambda n: body(b'"query":"ab","documents":' + many(b'"ab"', n))),
    "rerank-long": (RANKS, RERANK, lambda n: body(b'"query":"ab","max_tokens_per_doc":4,"documents":' + many(b'"%s"' % (b"ab " * 800), min(n, 2048 * 2403)))),
    "rerank-objects": (RANKS, RERANK, lambda n: body(b'"query":"ab","documents":' + many(b'{"text":"ab"}', n))),
    "rerank-parts": (RANKS, RERANK, lambda n: body(b'"query":"ab","documents":[{"content":' + many(b'{"type":"text","text":"ab"}', n) + b"}]")),
    "rerank-query": (RANKS, RERANK, lambda n: body(b'"documents":["ab"],"query":"%s"' % (b"ab " * (n // 3 - 60)))),
    "rerank-query-cut": (RANKS, RERANK, lambda n: body(b'"documents":' + many(b'"ab"', 60), b'"max_tokens_per_query":5,"query":"%s"' % (b"a " * (min(n, LONGEST) // 2)))),
    "score": (RANKS, "/score", lambda n: body(b'"queries":' + texts(n // 2, 1024), b'"documents":' + texts(n // 2, 1024))),
    "score-shapes": (RANKS, "/score", lambda n: body(b'"queries":' + many(b'"ab"', n // 2), b'"documents":["ab"]')),
}  # fmt: skip
SHORT = ("texts", "texts-base64", "ids-lists", "conversations", "cohere-texts", "rows", "rerank-vectors", "rerank-late", "score")  # fmt: skip
LONG = (
    "texts-too-many",
    "ids-large",
    "deep",
    "cohere-parts",
    "rerank-parts",
    "text-cut-most",
    "cohere-cut",
    "rerank-query-cut",
)
"""Sent in every run, short or at the full size; the others only in a slow one."""


def post(serving: Serving, name: str, size: int) -> Answer:
    info, path, make = CASES[name]
    server, raw = serving(info), make(size)

    async def go() -> Answer:
        await send(server.app, EMBEDDINGS, b'{"input":"warm"}')  # type: ignore[arg-type]
        gc.collect()
        with longest_callback() as held, Beats() as beats:
            status, found = await asyncio.ensure_future(send(server.app, path, raw))  # type: ignore[arg-type]
            for _ in range(20):
                await asyncio.sleep(0)
        return Answer(status, found, held, beats.seconds)

    return asyncio.run(go())


def check(serving: Serving, name: str, size: int) -> None:
    """The measure is repeated when it fails: the first use of a module or a cache costs CPU time once."""
    for _ in range(3):
        answer = post(serving, name, size)
        if answer.held.seconds < LIMIT_S and answer.gap < GIL_LIMIT_S:
            break
    assert answer.held.seconds < LIMIT_S, (answer.held, answer.body[:200])
    assert answer.gap < GIL_LIMIT_S, (answer.gap, answer.body[:200])
    assert answer.status in (200, 400), answer.body[:500]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SHORT)
def test_no_short_body_blocks_the_event_loop(serving: Serving, name: str):
    check(serving, name, SMALL)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LONG)
def test_no_long_body_blocks_the_event_loop(serving: Serving, name: str):
    check(serving, name, MOST_BODY - 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SHORT])
def test_a_short_body_does_not_block_the_event_loop(serving: Serving, name: str):
    check(serving, name, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in LONG])
def test_a_body_at_the_size_limit_does_not_block_the_event_loop(serving: Serving, name: str):
    check(serving, name, MOST_BODY - 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rerank-long", "text-cut", "ids-large", "cohere-parts"])
def test_a_long_body_needs_a_bounded_multiple_of_its_size(serving: Serving, name: str):
    size = 1 << 20
    tracemalloc.start()
    try:
        post(serving, name, size)
        gc.collect()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        post(serving, name, size)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 32 * size
    assert after - before < size
