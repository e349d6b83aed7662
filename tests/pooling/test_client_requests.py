"""Requests as clients send them, recorded from cohere 5.21, langchain-cohere 0.6, langchain-openai 1.7 and openai 3.54."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from conftest import Serving
from msgspec.structs import replace
from vector_engine import CLS, EMBEDS, RANKS, SEP, letters, vector_of

TEXTS = ["ab", "b"]


def ids(text: str) -> list[int]:
    return [CLS, *letters(text), SEP]


def vectors(texts: list[str] = TEXTS) -> list[list[float]]:
    return [vector_of(ids(text)).tolist() for text in texts]


def ask(serving: Serving, path: str, body: dict[str, Any], info: Any = EMBEDS) -> Any:
    found = serving(info).ask(path, {"model": "toy", **body})
    assert found.status_code == 200, found.text
    return found.json()


COHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "ClientV2.embed": ("/v2/embed", {"texts": TEXTS, "input_type": "search_document", "embedding_types": ["float"]}),
    "ClientV2.embed, options": ("/v2/embed", {"texts": TEXTS, "input_type": "search_query", "max_tokens": 8, "embedding_types": ["float"], "truncate": "END"}),
    "langchain CohereEmbeddings": ("/v1/embed", {"texts": TEXTS, "input_type": "search_document", "embedding_types": ["float"], "truncate": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", COHERE)
def test_coheres_vectors(serving: Serving, name: str):
    found = ask(serving, *COHERE[name])
    assert found["embeddings"]["float"] == vectors()
    assert found["response_type"] == "embeddings_by_type"
    assert found["meta"]["billed_units"]["input_tokens"] == 7


def test_coheres_vectors_of_version_1(serving: Serving):
    body = {"texts": TEXTS, "input_type": "classification"}
    found = ask(serving, "/v1/embed", body)
    assert (found["embeddings"], found["response_type"]) == (vectors(), "embeddings_floats")
    assert found["texts"] == TEXTS


def test_coheres_input_types_name_prompts(serving: Serving):
    info = replace(EMBEDS, prompts={"query": "q ", "passage": "p "})
    for kind, before in (("search_query", "q"), ("search_document", "p"), ("query", "q")):
        body = {"texts": ["a"], "input_type": kind, "embedding_types": ["float"]}
        found = ask(serving, "/v2/embed", body, info)
        assert found["embeddings"]["float"] == vectors([before + "a"])
    for kind in ("clustering", "x"):
        said = serving(info).error("/v2/embed", {"texts": ["a"], "input_type": kind})
        assert "it has 'query', 'passage'" in said
    assert "it has none" in serving(EMBEDS).error("/v2/embed", {"texts": ["a"], "input_type": "x"})


RERANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ClientV2.rerank": ("/v2/rerank", {"documents": ["ab", "b"]}),
    "Client.rerank": ("/v1/rerank", {"documents": ["ab", {"text": "b"}], "return_documents": True}),
    "langchain CohereRerank": ("/v2/rerank", {"documents": ["ab", "b"], "max_tokens_per_doc": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", RERANKS)
def test_coheres_ranks(serving: Serving, name: str):
    path, body = RERANKS[name]
    for info in (RANKS, EMBEDS):
        (best,) = ask(serving, path, {"query": "b", "top_n": 1, **body}, info)["results"]
        scores = ask(serving, "/score", {"queries": "b", "documents": TEXTS}, info)["data"]
        most = max(scores, key=lambda one: one["score"])
        assert (best["index"], best["relevance_score"]) == (most["index"], most["score"])


def test_openais_and_langchains_vectors(serving: Serving):
    for body in ({"input": TEXTS}, {"input": TEXTS, "user": "u"}):
        found = ask(serving, "/v1/embeddings", {**body, "encoding_format": "base64"})["data"]
        decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in found]
        assert [one.tolist() for one in decoded] == vectors()
