"""Clients of embeddings and reranking against quire-tiny-embed, each beside the answer without a client."""

from __future__ import annotations

import base64
import gc
import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client_runs import serve

MODEL = "quire-tiny-embed"
TEXTS = ["The cat sat on the mat.", "Tom has three apples."]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of vectors, without /v1."""
    with serve(tmp_path_factory.mktemp("server") / "log", MODEL) as found:
        yield found
        gc.collect()  # connections that clients leave open


@pytest.fixture(scope="module")
def plain(root: str) -> Callable[[str, dict[str, Any]], Any]:
    def post(path: str, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": MODEL, **body}).encode()
        request = urllib.request.Request(root + path, data, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))

    return post


@pytest.fixture(scope="module")
def vectors(plain: Callable[..., Any]) -> list[list[float]]:
    return [one["embedding"] for one in plain("/v1/embeddings", {"input": TEXTS})["data"]]


@pytest.fixture(scope="module")
def ranked(plain: Callable[..., Any]) -> list[tuple[int, float]]:
    found = plain("/v1/rerank", {"query": "a cat", "documents": TEXTS})["results"]
    return [(one["index"], one["relevance_score"]) for one in found]


def same(found: Any, expected: list[list[float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert list(one) == pytest.approx(other, abs=1e-6)


def test_openai_embeddings(root: str, vectors: list[list[float]]):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{root}/v1", api_key="x")
    found = client.embeddings.create(model=MODEL, input=TEXTS)  # base64, which the client decodes
    same([one.embedding for one in found.data], vectors)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 0
    found = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    same([found.data[0].embedding], vectors[:1])
    with pytest.raises(openai.BadRequestError, match="or /v1/embeddings"):
        client.completions.create(model=MODEL, prompt="a")


def test_langchain_embeddings(root: str, vectors: list[list[float]]):
    langchain_openai = pytest.importorskip("langchain_openai")
    how: dict[str, Any] = {"model": MODEL, "base_url": f"{root}/v1", "api_key": "x"}
    model = langchain_openai.OpenAIEmbeddings(check_embedding_ctx_length=False, **how)
    same(model.embed_documents(TEXTS), vectors)
    same([model.embed_query(TEXTS[1])], vectors[1:])


def test_cohere(root: str, vectors: list[list[float]], ranked: list[tuple[int, float]]):
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="x", base_url=root)
    how: dict[str, Any] = {"model": MODEL, "texts": TEXTS, "input_type": "search_document"}
    found = client.embed(embedding_types=["float", "ubinary"], **how).embeddings
    same(found.float_, vectors)
    assert len(found.ubinary[0]) * 8 == len(vectors[0])
    answer = client.rerank(model=MODEL, query="a cat", documents=TEXTS, top_n=2)
    assert [(one.index, pytest.approx(one.relevance_score)) for one in answer.results] == ranked


def test_langchain_cohere(root: str, vectors: list[list[float]], ranked: list[tuple[int, float]]):
    langchain_cohere = pytest.importorskip("langchain_cohere")
    how: dict[str, Any] = {"model": MODEL, "base_url": root, "cohere_api_key": "x"}
    same(langchain_cohere.CohereEmbeddings(**how).embed_documents(TEXTS), vectors)
    found = langchain_cohere.CohereRerank(top_n=2, **how).rerank(TEXTS, "a cat")
    assert [(one["index"], pytest.approx(one["relevance_score"])) for one in found] == ranked


def test_llama_index_embeddings(root: str, vectors: list[list[float]]):
    like = pytest.importorskip("llama_index.embeddings.openai_like")
    model = like.OpenAILikeEmbedding(model_name=MODEL, api_base=f"{root}/v1", api_key="x")
    same(model.get_text_embedding_batch(TEXTS), vectors)


def test_base64_by_hand(plain: Callable[..., Any], vectors: list[list[float]]):
    import numpy as np

    found = plain("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})["data"]
    same([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in found], vectors)
