"""Vectors of conversations and prompts with pictures: those of Transformers' hidden states, over HTTP and in a program."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_picture_equality import given, processor, prompt_of
from vision_checkpoints import as_file, picture, transformers_model
from vision_server import VisionServer, asking, data_url, image_part

from quire.errors import Unsupported

TEXT = "What is in @ here?"


def expected_vector(path: str, text: str, image) -> np.ndarray:
    """The normalized hidden state of the last token."""
    inputs = processor(path)(images=[image], text=[text], return_tensors="pt", add_special_tokens=False)  # fmt: skip
    with torch.inference_mode():
        state = transformers_model(path).model(**inputs).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(state, dim=0).numpy()


def test_vectors_in_a_program(engine, checkpoint):
    image = picture(1, width=150, height=90)
    with engine("qwen2_vl", runner="pooling") as llm:
        (found,) = llm.embed([given("qwen2_vl", TEXT, [image])], use_tqdm=False)
        (again,) = llm.embed([given("qwen2_vl", TEXT, [image])], use_tqdm=False)
        (other,) = llm.embed([given("qwen2_vl", TEXT, [picture(2)])], use_tqdm=False)
    vector = np.array(found.outputs.embedding)
    assert np.abs(vector - expected_vector(checkpoint("qwen2_vl"), prompt_of("qwen2_vl", TEXT), image)).max() < 1e-4  # fmt: skip
    assert found.outputs.embedding == again.outputs.embedding != other.outputs.embedding


@pytest.fixture(scope="module")
def server(checkpoint, same_process):
    path = checkpoint("qwen2_vl")
    made = VisionServer(path, same_process(path), runner="pooling")
    yield made
    made.close()


def test_vectors_over_http(server):
    part, text = image_part(data_url(as_file(picture(1)))), {"type": "text", "text": "What?"}
    messages = asking(part, text)["messages"]
    first = server.ask("/v1/embeddings", {"messages": messages}).json()
    vector = first["data"][0]["embedding"]
    count = server.ask("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["count"]  # fmt: skip
    assert first["usage"]["prompt_tokens"] == count
    several = server.ask("/v1/embeddings", {"input": [messages, asking(text)["messages"]]}).json()
    assert several["data"][0]["embedding"] == vector != several["data"][1]["embedding"]
    pooled = server.ask("/pooling", {"messages": messages, "task": "embed"}).json()
    assert pooled["data"][0]["data"] == vector
    other = asking(image_part(data_url(as_file(picture(2)))), text)["messages"]
    assert server.ask("/v1/embeddings", {"messages": other}).json()["data"][0]["embedding"] != vector  # fmt: skip


def test_what_vectors_do_not_take_is_refused_with_its_place(server):
    bad = asking({"type": "text", "text": "a"}, image_part("ftp://x"))["messages"]
    for body, place in (({"messages": bad}, "messages[0].content[1].image_url.url"), ({"input": [bad]}, "input[0][0].content[1].image_url.url")):  # fmt: skip
        found = server.ask("/v1/embeddings", body)
        assert (found.status_code, found.json()["error"]["param"]) == (400, place)
    messages = asking(image_part(data_url(as_file(picture(1)))))["messages"]
    found = server.ask("/v1/embeddings", {"messages": messages, "truncate_prompt_tokens": 4})
    assert "truncate_prompt_tokens of a prompt with media" in found.json()["error"]["message"]
    for field, entry in (("documents", [{"content": [image_part("ftp://x")]}]), ("documents", {"content": [image_part("ftp://x")]})):  # fmt: skip
        place = f"{field}[0].content" if isinstance(entry, list) else f"{field}.content"
        found = server.ask("/score", {"queries": "a", field: entry}).json()["error"]
        assert found["param"] == f"{place}[0].image_url.url"
    pair = {"queries": "a", "documents": [{"content": [image_part(data_url(as_file(picture(1))))]}]}
    found = server.ask("/score", {**pair, "max_tokens_per_doc": 4}).json()["error"]
    assert "max_tokens_per_doc beside pictures" in found["message"]
    part = image_part(data_url(as_file(picture(1))))
    for document in ({"output": [part]}, [{"content": [part]}], {"content": [{"content": [part]}]}, {"content": ["a", 1, None]}, {"content": [part, 7]}):  # fmt: skip
        assert server.ask("/score", {"queries": "a", "documents": [document]}).status_code == 400


PAIR = "<s>{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"


def test_a_reranker_reads_both_texts_of_a_pair_with_pictures(checkpoint, same_process, engine):
    """In the form of Qwen3-VL-Reranker: the score is the share of one of two tokens, after a template with both."""
    path, words = checkpoint("qwen2_vl"), ["a", "b"]
    options = {"runner": "pooling", "convert": "classify", "hf_overrides": {"classifier_from_token": words}}  # fmt: skip
    made = VisionServer(path, same_process(path), chat_template=PAIR, **options)  # fmt: skip
    part, query = image_part(data_url(as_file(picture(1)))), "which shape?"
    documents = [{"content": [part, {"type": "text", "text": "What?"}]}, "words", {"content": [part]}]  # fmt: skip

    def expected(document: str, pictures: list) -> float:
        text = prompt_of("qwen2_vl", f"[query]{query}[document]{document}")
        inputs = processor(path)(images=pictures or None, text=[text], return_tensors="pt", add_special_tokens=False)  # fmt: skip
        ids = [processor(path).tokenizer.convert_tokens_to_ids(word) for word in words]
        with torch.inference_mode():
            two = transformers_model(path)(**inputs).logits[0, -1, ids]
        return float(two.softmax(-1)[1])

    try:
        want = [expected("@What?", [picture(1)]), expected("words", []), expected("@", [picture(1)])]  # fmt: skip
        found = made.ask("/score", {"queries": query, "documents": documents}).json()
        assert np.abs(np.array([one["score"] for one in found["data"]]) - want).max() < 1e-4
        ranked = made.ask("/rerank", {"query": query, "documents": documents}).json()["results"]
        assert [one["index"] for one in ranked] == list(np.argsort(-np.array(want)))
        assert {one["document"]["text"] for one in ranked} == {"What?", "words", ""}
        pair = {"queries": query, "documents": documents[:1], "max_tokens_per_doc": 4}
        assert "max_tokens_per_doc beside pictures" in made.ask("/score", pair).text
        bad = {"queries": query, "documents": [{"content": [part, 7]}]}
        assert made.ask("/score", bad).status_code == 400
    finally:
        made.close()
    with engine("qwen2_vl", **options) as llm:
        given_here = [{"content": [{"type": "image_pil", "image_pil": picture(1)}, {"type": "text", "text": "What?"}]}, *documents[1:]]  # fmt: skip
        scores = [one.outputs.score for one in llm.score(query, given_here, chat_template=PAIR, use_tqdm=False)]  # fmt: skip
        assert np.abs(np.array(scores) - want).max() < 1e-4
        with pytest.raises(Unsupported, match="without a template"):
            llm.score(query, given_here, use_tqdm=False)


def test_scores_of_pictures_are_products_of_their_vectors(server):
    what = {"type": "text", "text": "What?"}
    parts = [[image_part(data_url(as_file(picture(n)))), what] for n in (1, 2)]

    def vector(body: dict) -> np.ndarray:
        return np.array(server.ask("/v1/embeddings", body).json()["data"][0]["embedding"])

    query = vector({"input": "a red shape"})
    pictures = [vector({"messages": asking(*one)["messages"]}) for one in parts]
    plain = vector({"input": "words"})
    documents = [{"content": parts[0]}, "words", {"content": parts[1]}]
    found = server.ask("/score", {"queries": "a red shape", "documents": documents}).json()
    scores = [one["score"] for one in found["data"]]
    want = [float(query @ one) for one in (pictures[0], plain, pictures[1])]
    assert np.abs(np.array(scores) - want).max() < 1e-6
    assert len({round(score, 4) for score in scores}) == 3
    ranked = server.ask("/rerank", {"query": {"content": parts[1]}, "documents": documents}).json()
    assert ranked["results"][0]["index"] == 2
    assert abs(ranked["results"][0]["relevance_score"] - 1) < 1e-5
    assert ranked["results"][0]["document"] == {"text": "What?", "multi_modal": None}
