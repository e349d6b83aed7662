"""/score and /rerank under all paths, routes of the wrong kind, /invocations and keys, on scripted tensors."""

from __future__ import annotations

import asyncio
import io
import json

import numpy as np
import pytest
from msgspec.structs import replace
from vector_engine import (
    CLASSIFIES,
    CLS,
    EMBEDS,
    RANKS,
    SEP,
    letters,
    numbers_of,
    rows_of,
    vector_of,
)

from quire.cli.run_batch import ROUTES, answers
from quire.protocol.pooling_params import PoolingParams

PAIR_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}{{ instruction or '' }}"  # fmt: skip
SCORES, RERANKS = ("/score", "/v1/score"), ("/rerank", "/v1/rerank", "/v2/rerank")


def pair(first: str, second: str) -> list[int]:
    return [CLS, *letters(first), SEP, *letters(second), SEP]


def number(first: str, second: str) -> float:
    params = PoolingParams(second_text=2 + len(letters(first)))
    return float(numbers_of(pair(first, second), params, 1)[0])


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")])  # fmt: skip
@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("ab", "cd", [("ab", "cd")]),
        ("ab", ["cd", "e"], [("ab", "cd"), ("ab", "e")]),
        (["ab", "x"], ["cd", "e"], [("ab", "cd"), ("x", "e")]),
        (["ab"], [{"content": [{"type": "text", "text": "cd"}]}], [("ab", "cd")]),
    ],
)
def test_shapes_and_fields(serving, names, first, second, pairs):
    server = serving(RANKS)
    found = server.ask("/score", dict(zip(names, (first, second), strict=True)))
    assert found.status_code == 200, found.text
    body = found.json()
    assert body["data"] == [
        {"index": at, "object": "score", "score": number(*one)} for at, one in enumerate(pairs)
    ]
    assert body["id"].startswith("score-")
    assert body["usage"]["prompt_tokens"] == sum(len(pair(*one)) for one in pairs)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"queries": ["a", "b"], "documents": "c"}, "one for all, or as many"),
        ({"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "one for all, or as many"),
        ({"queries": "a"}, "send one of these pairs"),
        ({"queries": "a", "documents": "b", "text_1": "c"}, "send one of these pairs"),
        ({"text_1": "a", "items": "b"}, "send one of these pairs"),
        ({"queries": "a", "documents": []}, "is empty"),
        ({"queries": "a", "documents": [5]}, "documents[0] must be a text"),
        ({"queries": {"content": [{"type": "image_url"}]}, "documents": "a"}, "image_url"),
        ({"queries": "a", "documents": ["b"] * 2049}, "limit for one request is 2048"),
        ({"queries": "a", "documents": "b", "instruction": "x"}, "--chat-template"),
        ({"queries": "a", "documents": "b", "max_tokens_per_doc": 32}, "less than max_model_len"),
        ({"queries": "a", "documents": "b", "max_tokens_per_query": -1}, "max_tokens_per_query"),
        ({"queries": "a" * 20, "documents": "b" * 20}, "32 tokens: an input has 43"),
        ({"queries": "a", "documents": "b", "chat_template": "x"}, "--chat-template"),
    ],
)
def test_wrong_pairs(serving, body, message):
    assert message in serving(RANKS).error("/score", body)


def test_limits_and_truncation(serving):
    server = serving(RANKS)
    server.ask("/score", {"queries": "abcd", "documents": "vwxyz", "max_tokens_per_query": 2, "max_tokens_per_doc": 3})  # fmt: skip
    assert server.client.asked[-1].tokens == pair("ab", "vwx")
    server.ask("/score", {"queries": "a" * 30, "documents": "bcd", "truncate_prompt_tokens": -1})
    assert server.client.asked[-1].tokens == pair("a" * 26, "bcd")


def test_a_template_makes_the_prompts(serving):
    server = serving(RANKS, chat_template=PAIR_TEMPLATE)
    server.ask("/score", {"queries": "ab", "documents": "cd", "instruction": "go"})
    assert server.client.asked[-1].tokens == [CLS, *letters("q:abd:cdgo"), SEP]
    kwargs = {"chat_template_kwargs": {"instruction": "no"}, "instruction": "go"}
    server.ask("/score", {"queries": "ab", "documents": "cd"} | kwargs)
    assert server.client.asked[-1].tokens == [CLS, *letters("q:abd:cdno"), SEP]
    for name in ("chat_template", "tools", "tokenize"):
        body = {"queries": "a", "documents": "b", "chat_template_kwargs": {name: "x"}}
        assert server.ask("/score", body).status_code == 200
        assert server.client.asked[-1].tokens == [CLS, *letters("q:ad:b"), SEP], name


def test_scores_of_vectors(serving):
    server = serving()
    scores = [one["score"] for one in server.ask("/score", {"queries": "abc", "documents": ["abd", "xyz"]}).json()["data"]]  # fmt: skip
    query, *others = [vector_of([CLS, *letters(text), SEP]) for text in ("abc", "abd", "xyz")]
    assert scores == [float(np.dot(query, one)) for one in others]
    apart = np.stack(others) - query
    for similarity, expected in (
        ("euclidean", (apart**2).sum(1) ** 0.5),
        ("manhattan", np.abs(apart).sum(1)),
    ):
        other = serving(replace(EMBEDS, similarity=similarity))
        found = other.ask("/score", {"queries": "abc", "documents": ["abd", "xyz"]}).json()["data"]
        assert [one["score"] for one in found] == pytest.approx((-expected).tolist(), rel=1e-5)
    body, asked = {"queries": "abc", "documents": ["abd"]}, {"cosine": True, "dot": None}
    for similarity, activation in asked.items():
        other = serving(replace(EMBEDS, similarity=similarity))
        other.ask("/score", body)
        assert other.client.asked[-1].params.use_activation is activation
    late = serving(replace(EMBEDS, tasks=["token_embed"]))
    (score,) = late.ask("/score", {"queries": "abc", "documents": "abd"}).json()["data"]
    query, document = (rows_of([CLS, *letters(text), SEP]) for text in ("abc", "abd"))
    assert score["score"] == float((query @ document.T).max(1).sum())
    assert "scores need" in serving(CLASSIFIES).error("/score", {"queries": "a", "documents": "b"})


@pytest.mark.parametrize("path", RERANKS)
def test_rerank(serving, path):
    server = serving(RANKS)
    documents = ["cd", "e", "abc", "e", "f"]
    body = server.ask(path, {"query": "ab", "documents": documents}).json()
    expected = sorted(enumerate(number("ab", one) for one in documents), key=lambda one: -one[1])
    assert [(one["index"], one["relevance_score"]) for one in body["results"]] == expected
    assert [one["document"]["text"] for one in body["results"]] == [documents[at] for at, _ in expected]  # fmt: skip
    equal = [one["index"] for one in body["results"] if documents[one["index"]] == "e"]
    assert equal == [1, 3]  # ties keep their order
    for top, count in ((0, 5), (2, 2), (9, 5)):
        found = server.ask(path, {"query": "ab", "documents": documents, "top_n": top}).json()
        assert found["results"] == body["results"][:count]
    assert "top_n" in server.error(path, {"query": "a", "documents": ["b"], "top_n": -1})
    assert "`query`" in server.error(path, {"documents": ["b"]})
    assert "is empty" in server.error(path, {"query": "a", "documents": []})


def test_a_long_answer_of_rerank(serving):
    server = serving(RANKS)
    documents = [f"{at % 7}" for at in range(2048)]
    found = server.ask("/rerank", {"query": "a", "documents": documents}).json()["results"]
    assert sorted(one["index"] for one in found) == list(range(2048))
    assert found[0]["relevance_score"] == max(number("a", str(at)) for at in range(7))


# -- the wrong kind of model -------------------------------------------------------------------------
POOLING_BODIES = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/v1/embed": {"texts": ["a"]},
    "/v2/embed": {"texts": ["a"]},
    **{path: {"queries": "a", "documents": "b"} for path in SCORES},
    **{path: {"query": "a", "documents": ["b"]} for path in RERANKS},
}
GENERATING_BODIES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
}


@pytest.mark.parametrize("path", POOLING_BODIES)
def test_a_generating_model_refuses_pooling_routes(serving, path):
    server = serving(None)
    message = server.error(path, POOLING_BODIES[path])
    assert "/v1/chat/completions" in message
    assert "--runner pooling" in message
    assert server.error(path, {}) == message
    assert path in ROUTES, "run-batch answers it"


@pytest.mark.parametrize("path", GENERATING_BODIES)
def test_a_pooling_model_refuses_generating_routes(serving, path):
    found = serving().ask(path, GENERATING_BODIES[path])
    assert found.status_code == 400
    assert "/v1/embeddings" in found.json()["error"]["message"]
    assert (found.json().get("type") == "error") == (path == "/v1/messages")


def test_invocations_select_the_endpoint(serving):
    embeds, ranks, labels = serving(), serving(RANKS), serving(CLASSIFIES)
    tokens = serving(replace(EMBEDS, tasks=["token_embed"]))
    asked = [
        (embeds, {"input": "a"}, "embd-"),
        (embeds, {"messages": [{"role": "user", "content": "a"}]}, "embd-"),
        (labels, {"input": "a"}, "classify-"),
        (tokens, {"input": "a"}, "pooling-"),
        (ranks, {"query": "a", "documents": ["b"]}, "rerank-"),
        (ranks, {"text_1": "a", "text_2": "b"}, "score-"),
    ]
    for server, body, prefix in asked:
        assert server.ask("/invocations", body).json()["id"].startswith(prefix)
    assert "`query`" in embeds.error("/invocations", {"prompt": "a"})


@pytest.mark.parametrize("path", [*POOLING_BODIES, "/invocations"])
def test_keys_guard_every_route(serving, path):
    server = serving(api_key="k")
    body = POOLING_BODIES.get(path, {"input": "a"})
    assert server.ask(path, body).status_code == 401
    assert server.ask(path, body, {"Authorization": "Bearer k"}).status_code in (200, 400)


def test_a_batch_file(serving):
    server = serving(replace(EMBEDS, matryoshka=[]))
    bodies = [*POOLING_BODIES.items(), ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"})]  # fmt: skip
    lines = [json.dumps({"custom_id": url, "method": "POST", "url": url, "body": body}) for url, body in bodies]  # fmt: skip

    async def go() -> list[dict]:
        return [one async for one in answers(server.app, io.BytesIO("\n".join(lines).encode()))]

    found = asyncio.run(go())
    statuses = {one["custom_id"]: one["response"]["status_code"] for one in found[:-1]}
    assert statuses == {path: 400 if path == "/classify" else 200 for path in POOLING_BODIES}
    assert "float or base64" in found[-1]["response"]["body"]["error"]["message"]
