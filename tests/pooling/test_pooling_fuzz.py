"""Random and mutated bodies on every pooling route: no answer is a 5xx, none hangs, nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import malformed_requests
import pytest
from msgspec.structs import replace
from vector_engine import CLASSIFIES, EMBEDS, RANKS, SIZE

PATIENCE_S = 120
HI = [{"role": "user", "content": "hi"}]
GOOD = [
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/embeddings", {"input": ["hi", "ho"], "encoding_format": "base64", "embed_dtype": "float16", "dimensions": 4}),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "encoding_format": "bytes", "endianness": "big", "truncate_prompt_tokens": 4}),
    ("/v1/embeddings", {"messages": HI, "add_generation_prompt": True}),
    ("/v1/embeddings", {"input": [HI, HI], "chat_template_kwargs": {"a": 1}, "prompt_name": "query"}),
    ("/pooling", {"input": ["hi", "ho"], "task": "token_embed", "use_activation": False}),
    ("/classify", {"input": ["hi"], "truncation_side": "left", "truncate_prompt_tokens": -1}),
    ("/score", {"queries": ["a", "b"], "documents": ["c", "d"], "max_tokens_per_query": 2}),
    ("/v1/score", {"text_1": "a", "text_2": [{"content": [{"type": "text", "text": "b"}]}]}),
    ("/rerank", {"query": "a", "documents": ["c", "d"], "top_n": 1, "instruction": "x"}),
    ("/v2/rerank", {"query": {"content": "a"}, "documents": [{"text": "c"}], "max_tokens_per_doc": 3}),
    ("/v2/embed", {"texts": ["hi"], "input_type": "query", "embedding_types": ["float", "binary", "base64"], "truncate": "END"}),
    ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": "b"}]}], "max_tokens": 4, "output_dimension": 8}),
    ("/invocations", {"input": "hi"}),
    ("/invocations", {"query": "a", "documents": ["b"]}),
]  # fmt: skip
CUTS = replace(EMBEDS, matryoshka=[], prompts={"query": "q: "}, num_dimensions=SIZE)


def fuzz(server, seed: int, count: int) -> Counter[int]:
    draw, statuses = random.Random(seed), Counter[int]()

    async def odd(http, path: str, raw: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        found = await asyncio.wait_for(http.post(path, content=raw, headers=headers), PATIENCE_S)
        statuses[found.status_code] += 1
        assert found.status_code < 500, (path, raw[:2000], found.text)
        if found.status_code >= 400:
            assert found.json()["error"]["message"]
            assert "see the server's log" not in found.text, (path, raw[:2000], found.text)

    async def go() -> None:
        async with server.http() as http:
            for _ in range(0, count, 8):
                some = [draw.choice(GOOD) for _ in range(8)]
                bodies = [malformed_requests.body(draw, path, good) for path, good in some]
                await asyncio.gather(*(odd(http, path, raw) for (path, _), raw in zip(some, bodies, strict=True)))  # fmt: skip

    asyncio.run(go())
    gc.collect()  # a task that was never awaited warns here, and a warning is an error
    assert not server.state.active
    assert not server.state.engine.front.live
    return statuses


@pytest.mark.parametrize("info", [CUTS, CLASSIFIES, RANKS], ids=["embeds", "classifies", "ranks"])
def test_no_body_breaks_the_server(serving, info):
    statuses = fuzz(serving(info), 1, 160)
    assert statuses[400] > 20
    assert statuses[200] > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_no_body_breaks_the_server_ever(serving, seed):
    for info in (CUTS, CLASSIFIES, RANKS):
        fuzz(serving(info), seed, 3000)
