"""/v1/embeddings, /pooling, /classify and /v2/embed on an engine with scripted tensors."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import torch
from msgspec.structs import replace
from vector_engine import (
    CLASSIFIES,
    CLS,
    EMBEDS,
    SEP,
    SIZE,
    letters,
    numbers_of,
    rows_of,
    vector_of,
)

from quire.protocol.pooling_params import PoolingParams
from quire.server.pooling.vectors import VectorEncoding

CUTS = replace(EMBEDS, matryoshka=[2, 4])


def ids(text: str) -> list[int]:
    return [CLS, *letters(text), SEP]


def vectors(answer) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("abc", [ids("abc")]),
        (["abc", "d"], [ids("abc"), ids("d")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([{"role": "user", "content": "abc"}], [letters("u:abc")]),
        ([[{"role": "user", "content": "abc"}], [{"role": "user", "content": "d"}]], [letters("u:abc"), letters("u:d")]),
        ("", [ids("")]),
    ],
)  # fmt: skip
def test_input_forms(serving, given, expected):
    server = serving()
    answer = server.ask("/v1/embeddings", {"input": given, "model": "toy"})
    assert vectors(answer) == [vector_of(one).tolist() for one in expected]
    body = answer.json()
    total = sum(map(len, expected))
    assert body["usage"] == {
        "prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None,
    }  # fmt: skip
    assert (body["object"], body["model"], body["data"][0]["object"]) == ("list", "toy", "embedding")  # fmt: skip
    assert body["id"].startswith("embd-")
    assert not server.state.active


def test_spans_have_the_ids_that_clients_know(serving):
    """Where several HTTP processes share an engine, requests have other ids there."""
    server, spans = serving(), []
    server.state.fronts = 2
    server.state.tracer = SimpleNamespace(request=lambda about, _: spans.append(about.name))
    id = server.ask("/v1/embeddings", {"input": ["a", "b"]}).json()["id"]
    assert sorted(spans) == [f"{id}-0", f"{id}-1"]


def test_messages(serving):
    server = serving()
    asked = [{"role": "user", "content": "abc"}]
    assert vectors(server.ask("/v1/embeddings", {"messages": asked})) == [vector_of(letters("u:abc")).tolist()]  # fmt: skip
    server.ask("/v1/embeddings", {"messages": asked, "add_generation_prompt": True})
    assert server.client.asked[-1].tokens == letters("u:abc!")
    both = {"messages": asked, "add_generation_prompt": True, "continue_final_message": True}
    assert "exclude each other" in server.error("/v1/embeddings", both)
    assert "either" in server.error("/v1/embeddings", {"messages": asked, "input": "a"})
    assert "trust" in server.error("/v1/embeddings", {"messages": asked, "chat_template": "x"})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "`input` is missing"),
        ({"input": []}, "`input` is empty"),
        ({"input": [[]]}, "an input is empty"),
        ({"input": ["a", [1]]}, "all entries of one kind"),
        ({"input": [1, "a"]}, "all entries of one kind"),
        ({"input": [[1], ["a"]]}, "all entries of one kind"),
        ({"input": [True]}, "all entries of one kind"),
        ({"input": 5}, "must be a string"),
        ({"input": [99999]}, "is not a token id"),
        ({"input": [-1]}, "is not a token id"),
        ({"input": ["a"] * 2049}, "the limit for one request is 2048"),
        ({"input": "a" * 40}, "32 tokens: an input has 42"),
        ({"input": [5] * 33}, "32 tokens: an input has 33"),
        ({"input": "a", "truncate_prompt_tokens": 33}, "at most 32"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "at least 1"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "up"}, "left"),
        ({"input": "a", "normalize": True}, "use_activation"),
        ({"input": "a", "dimensions": 4}, "not trained for it"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "x"}, "float, base64, bytes, bytes_only"),
        ({"input": "a", "embed_dtype": "int8"}, "fp8_e4m3"),
        ({"input": "a", "endianness": "x"}, "native, big, little"),
        ({"input": ["a"] * 300, "encoding_format": "bytes"}, "bytes_only"),
        ({"input": "a", "prompt_name": "x"}, "it has none"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
        ({"input": "a", "model": "x"}, "does not exist"),
    ],
)
def test_wrong_requests(serving, body, message):
    server = serving()
    assert message in server.error("/v1/embeddings", body, 404 if "model" in body else 400)
    assert not server.client.running


@pytest.mark.parametrize(
    ("limit", "side", "expected"),
    [(5, None, ids("abc")), (5, "left", ids("xyz")), (-1, None, ids("abc" * 9 + "xyz"))],
)
def test_truncation(serving, limit, side, expected):
    server = serving()
    body = {"input": "abc" * 9 + "xyz", "truncate_prompt_tokens": limit}
    server.ask("/v1/embeddings", body | ({"truncation_side": side} if side else {}))
    assert server.client.asked[-1].tokens == expected


def test_many_inputs_in_order(serving):
    server = serving()
    texts = [f"{number:04}" for number in range(2048)]
    answer = server.ask("/v1/embeddings", {"input": texts, "encoding_format": "base64"})
    got = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in vectors(answer)]
    assert got == [vector_of(ids(text)).tolist() for text in texts]
    ids_ = {one.id for one in server.client.asked}
    assert len(ids_) == 2048
    assert not server.state.active


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("order", ["native", "big", "little"])
@pytest.mark.parametrize("form", ["base64", "bytes", "bytes_only"])
def test_encodings(serving, dtype, order, form):
    server = serving()
    texts = ["abc", "xyzab"]
    kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}  # fmt: skip
    answer = server.ask("/v1/embeddings", {"input": texts, "encoding_format": form, "embed_dtype": dtype, "endianness": order})  # fmt: skip
    whole = b"".join(map(base64.b64decode, vectors(answer))) if form == "base64" else answer.content
    size = kinds[dtype].itemsize
    if order == "big":
        whole = np.frombuffer(whole, f"V{size}").tobytes()
        whole = np.frombuffer(whole, f">u{size}").astype(f"<u{size}").tobytes()
    found = torch.frombuffer(bytearray(whole), dtype=kinds[dtype]).float()
    expected = torch.cat([torch.from_numpy(vector_of(ids(text))) for text in texts])
    assert torch.equal(found, expected.to(kinds[dtype]).float())
    if form == "base64":
        return
    assert answer.headers["content-type"] == "application/octet-stream"
    assert ("metadata" in answer.headers) == (form == "bytes")
    if form == "bytes":
        metadata = json.loads(answer.headers["metadata"])
        assert metadata["usage"]["prompt_tokens"] == 12
        assert metadata["data"][1] == {
            "index": 1, "embed_dtype": dtype, "endianness": order, "start": SIZE * size, "end": 2 * SIZE * size, "shape": [SIZE],
        }  # fmt: skip


def test_rounding_as_torch():
    """Torch 2.11 made NaN of numbers beyond 464 in e4m3 (pytorch#178817); since then it gives 448, as these routes do."""
    draw = np.random.default_rng(0)
    numbers = draw.standard_normal(4096).astype(np.float32)
    numbers = np.concatenate([numbers * scale for scale in (1e-6, 1e-3, 1, 100, 1e5)])
    special = [0.0, -0.0, 448, 464, 465, 480, 57344, 61439, 61440, 65504, 1e38, -1e38, np.inf, -np.inf, np.nan, 2**-10, 2**-17]  # fmt: skip
    numbers = np.concatenate([numbers, np.array(special, np.float32)])
    for name, kind in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):  # fmt: skip
        data = bytearray(VectorEncoding("base64", name, "little").encoded(numbers))
        found = torch.frombuffer(data, dtype=kind).float()
        within = numbers.clip(-448, 448) if name == "fp8_e4m3" else numbers
        expected = torch.from_numpy(within).to(kind).float()
        assert torch.equal(torch.nan_to_num(found, -1.0), torch.nan_to_num(expected, -1.0)), name
        assert torch.equal(torch.signbit(found), torch.signbit(expected)) or name != "fp8_e4m3"


def test_dimensions_and_activation(serving):
    server = serving(CUTS)
    (found,) = vectors(server.ask("/v1/embeddings", {"input": "abcab", "dimensions": 4}))
    full = vector_of(ids("abcab"), PoolingParams(use_activation=False))
    assert found == pytest.approx(full[:4] / np.linalg.norm(full[:4]))
    (raw,) = vectors(server.ask("/v1/embeddings", {"input": "abcab", "use_activation": False}))
    assert raw == full.tolist()
    assert "one of 2, 4" in server.error("/v1/embeddings", {"input": "a", "dimensions": 3})
    assert "/v1/embeddings" in server.error("/pooling", {"input": "a", "dimensions": 4})


def test_pooling_route(serving):
    server = serving()
    found = server.ask("/pooling", {"input": "abc"}).json()
    assert found["data"] == [{"index": 0, "object": "pooling", "data": vector_of(ids("abc")).tolist()}]  # fmt: skip
    assert found["id"].startswith("pooling-")
    (item,) = server.ask("/pooling", {"input": "abc", "task": "token_embed"}).json()["data"]
    assert item["data"] == rows_of(ids("abc")).tolist()
    answer = server.ask("/pooling", {"input": ["abc", "d"], "task": "token_embed", "encoding_format": "bytes"})  # fmt: skip
    shapes = [one["shape"] for one in json.loads(answer.headers["metadata"])["data"]]
    assert shapes == [[5, SIZE], [3, SIZE]]
    assert answer.content == b"".join(rows_of(ids(text)).tobytes() for text in ("abc", "d"))
    assert "embed: LLM.embed, or /v1/embeddings" in server.error("/pooling", {"input": "a", "task": "classify"})  # fmt: skip
    assert "IO processor" in server.error("/pooling", {"input": "a", "task": "plugin"})


def test_large_answers_of_rows(serving):
    server = serving(max_model_len=4096, max_answer_entries=4096)
    body = {"input": ["ab" * 1000, "c"], "task": "token_embed"}
    answer = server.ask("/pooling", body)
    assert answer.json()["data"][0]["data"] == rows_of(ids("ab" * 1000)).tolist()
    body["input"] = ["ab" * 2000] * 3
    assert "more than 65536 numbers" in server.error("/pooling", body)
    assert not server.state.active


def test_classify(serving):
    server = serving(CLASSIFIES)
    body = server.ask("/classify", {"input": ["abc", "d"]}).json()
    for item, text in zip(body["data"], ("abc", "d"), strict=True):
        probs = numbers_of(ids(text), PoolingParams(), 3)
        assert item["probs"] == probs.tolist()
        assert item["label"] == ["red", "green", "blue"][int(probs.argmax())]
        assert item["num_classes"] == 3
    assert body["id"].startswith("classify-")
    (raw,) = server.ask("/classify", {"input": "abc", "use_activation": False}).json()["data"]
    assert raw["probs"] == numbers_of(ids("abc"), PoolingParams(use_activation=False), 3).tolist()
    wrong = server.error("/v1/embeddings", {"input": "a"})
    assert "classify: LLM.classify, or /classify" in wrong


def test_ids_and_priorities(serving):
    server = serving()
    answer = server.ask("/v1/embeddings", {"input": ["a", "b"], "priority": 3}, {"X-Request-Id": "mine"})  # fmt: skip
    assert answer.json()["id"] == "embd-mine"
    assert [one.id for one in server.client.asked] == ["embd-mine-0", "embd-mine-1"]
    assert {one.priority for one in server.client.asked} == {3}


def test_prompts_by_name(serving):
    info = replace(EMBEDS, prompts={"query": "q: ", "passage": "p: "})
    server = serving(info, default_prompt_name="query")
    server.ask("/v1/embeddings", {"input": "abc"})
    assert server.client.asked[-1].tokens == ids("q:abc")
    server.ask("/v1/embeddings", {"input": "abc", "prompt_name": "passage"})
    assert server.client.asked[-1].tokens == ids("p:abc")
    server.ask("/v1/embeddings", {"input": [5, 6]})
    assert server.client.asked[-1].tokens == [5, 6]


def test_metrics_and_aborts(serving):
    server = serving()
    server.ask("/v1/embeddings", {"input": ["abc", "d"]})
    text = server.state.metrics.render().decode()
    assert 'vllm:request_prompt_tokens_sum{engine="0",model_name="toy"} 8.0' in text
    assert 'vllm:e2e_request_latency_seconds_count{engine="0",model_name="toy"} 2.0' in text
    for name in ("inter_token_latency", "time_to_first_token"):
        assert f'vllm:{name}_seconds_count{{engine="0",model_name="toy"}} 0.0' in text
    assert 'vllm:request_generation_tokens_count{engine="0",model_name="toy"} 0.0' in text

    async def hang_up() -> None:
        server.client.held = True
        async with server.http() as http:
            asked = asyncio.ensure_future(http.post("/v1/embeddings", json={"input": ["abc"] * 3}))
            while len(server.client.asked) < 5:
                await asyncio.sleep(0.001)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(hang_up())
    assert len(server.client.aborted) == 3
    assert not server.state.active


def test_a_timeout_ends_the_request(serving):
    server = serving()
    server.client.held = True
    assert "`timeout`" in server.error("/v1/embeddings", {"input": "abc", "timeout": 0.01}, 408)
    assert len(server.client.aborted) == 1


def test_an_error_of_one_input_ends_the_request(serving):
    server = serving()
    server.client.refused[2] = "odd"
    assert "odd" in server.error("/v1/embeddings", {"input": ["a"] * 5})
    assert not server.state.active


# -- Cohere ------------------------------------------------------------------------------------------
def test_cohere_embed(serving):
    info = replace(CUTS, prompts={"search_query": "q: "}, matryoshka=[])
    server = serving(info)
    body = {"model": "toy", "texts": ["abc", "d"], "input_type": "search_query", "embedding_types": ["float", "binary", "ubinary", "base64"]}  # fmt: skip
    found = server.ask("/v2/embed", body).json()
    expected = [vector_of(ids(f"q:{text}")) for text in ("abc", "d")]
    assert found["embeddings"]["float"] == [one.tolist() for one in expected]
    assert found["embeddings"]["base64"] == [base64.b64encode(one.tobytes()).decode() for one in expected]  # fmt: skip
    bits = [int("".join("1" if number >= 0 else "0" for number in one), 2) for one in expected]
    assert found["embeddings"]["ubinary"] == [[one] for one in bits]
    assert found["embeddings"]["binary"] == [[one - 128] for one in bits]
    assert found["texts"] == ["abc", "d"]
    assert found["response_type"] == "embeddings_by_type"
    assert found["meta"]["billed_units"]["input_tokens"] == 12
    assert "it has 'search_query'" in server.error("/v2/embed", body | {"input_type": "x"})
    assert "8 divides" in server.error("/v2/embed", body | {"output_dimension": 4})
    assert "exactly one" in server.error("/v2/embed", body | {"inputs": [{"content": "a"}]})
    assert "exactly one" in server.error("/v2/embed", {"texts": []})
    assert "images" in server.error("/v2/embed", {"images": ["x"]})
    assert "embedding_types" in server.error("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]})  # fmt: skip


def test_cohere_truncates(serving):
    server = serving()
    for how, expected in (("END", ids("abc")), ("start", ids("cde"))):
        server.ask("/v2/embed", {"texts": ["abcde"], "truncate": how, "max_tokens": 5})
        assert server.client.asked[-1].tokens == expected
    none = {"texts": ["abcde"], "truncate": "NONE", "max_tokens": 5}
    assert "7 tokens, and `max_tokens` is 5" in server.error("/v2/embed", none)
    server.ask("/v2/embed", {"texts": ["a" * 40]})
    assert len(server.client.asked[-1].tokens) == 32
    assert "truncate" in server.error("/v2/embed", {"texts": ["a"], "truncate": "X"})
    inputs = [{"content": [{"type": "text", "text": "ab"}]}]
    assert server.ask("/v2/embed", {"inputs": inputs}).json()["embeddings"]["float"] == [vector_of(ids("ab")).tolist()]  # fmt: skip


# -- clients -----------------------------------------------------------------------------------------
def test_openais_client_reads_the_vectors(serving):
    server = serving()
    texts = ["abc", "d"]

    async def go(**more) -> list[list[float]]:
        async with server.http() as http:
            client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="x", http_client=http)
            found = await client.embeddings.create(model="toy", input=texts, **more)
            assert found.usage.prompt_tokens == 8
            return [one.embedding for one in found.data]

    expected = [vector_of(ids(text)).tolist() for text in texts]
    assert asyncio.run(go()) == expected  # it asks for base64 by itself
    assert asyncio.run(go(encoding_format="float")) == expected
