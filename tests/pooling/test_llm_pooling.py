"""LLM.embed, encode, classify, score and reward on an engine with scripted tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from vector_engine import (
    CLASSIFIES,
    CLS,
    EMBEDS,
    RANKS,
    SEP,
    SIZE,
    VectorClient,
    letters,
    numbers_of,
    rows_of,
    vector_of,
    write_bert_tokenizer,
)

from quire import LLM, PoolingParams
from quire.errors import Unsupported, ValidationError
from quire.protocol.pooling_info import PoolingInfo

PAIR_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}{{ instruction or '' }}"  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert")
    write_bert_tokenizer(made)
    return made


def made(
    folder: Path, info: PoolingInfo | None = EMBEDS, **more: object
) -> tuple[LLM, VectorClient]:
    client = VectorClient(folder, info, **more)  # type: ignore[arg-type]
    return LLM.from_client(client), client  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return [CLS, *letters(text), SEP]


def pair(first: str, second: str) -> list[int]:
    return [*ids(first), *letters(second), SEP]


def test_embed_returns_a_vector_for_each_prompt_in_order(folder):
    llm, client = made(folder)
    texts = ["abc", "xyz", "a b c", "hello"] * 50
    found = llm.embed(texts, use_tqdm=False)
    assert [one.outputs.embedding for one in found] == [vector_of(ids(t)).tolist() for t in texts]
    assert found[3].outputs.hidden_size == SIZE
    assert found[3].prompt_token_ids == ids("hello")
    assert found[3].finished
    assert client.most_at_once <= 2 * client.resolved.max_num_seqs
    assert not llm.has_unfinished_requests()


def test_prompt_forms(folder):
    llm, client = made(folder)
    found = llm.embed(["abc", letters("abc"), {"prompt": "abc"}, {"prompt_token_ids": [5, 6]}])
    assert [one.prompt_token_ids for one in found] == [ids("abc"), letters("abc"), ids("abc"), [5, 6]]  # fmt: skip
    llm.embed("abc", tokenization_kwargs={"add_special_tokens": False})
    assert client.asked[-1].tokens == letters("abc")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"truncate_prompt_tokens": 4}, [CLS, *letters("ab"), SEP]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [CLS, *letters("de"), SEP]),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, letters("abc")),
        ({"truncate_prompt_tokens": -1}, ids("abcde")),
        ({"truncate_prompt_tokens": 1}, [CLS]),
    ],
)
def test_truncation_keeps_special_tokens(folder, how, expected):
    llm, client = made(folder)
    llm.embed("abcde", tokenization_kwargs=how)
    assert client.asked[-1].tokens == expected


def test_lengths(folder):
    llm, client = made(folder, max_model_len=8)
    llm.embed("abcdef")  # 8 tokens: all of the context
    with pytest.raises(ValidationError, match=r"length is 8 tokens: an input has 9"):
        llm.embed("abcdefg")
    llm.embed("abcdefghijklmnop", tokenization_kwargs={"truncate_prompt_tokens": -1})
    assert client.asked[-1].tokens == ids("abcdef")
    for limit in (9, 0, -2):
        with pytest.raises(ValidationError, match="truncate_prompt_tokens"):
            llm.embed("abc", tokenization_kwargs={"truncate_prompt_tokens": limit})
    with pytest.raises(ValidationError, match="is empty"):
        llm.embed([{"prompt": ""}], tokenization_kwargs={"add_special_tokens": False})
    with pytest.raises(ValidationError, match="check_embedding_ctx_length"):
        llm.embed([[100_000]])


def test_dimensions_are_checked_by_the_model(folder):
    fixed, _ = made(folder)
    with pytest.raises(ValidationError, match="not trained for it"):
        fixed.embed("abc", pooling_params=PoolingParams(dimensions=4))
    some, _ = made(folder, replace(EMBEDS, matryoshka=[2, 4]))
    (found,) = some.embed("abc", pooling_params=PoolingParams(dimensions=4))
    assert found.outputs.embedding == vector_of(ids("abc"), PoolingParams(dimensions=4)).tolist()
    with pytest.raises(ValidationError, match="one of 2, 4"):
        some.embed("abc", pooling_params=PoolingParams(dimensions=3))
    free, _ = made(folder, replace(EMBEDS, matryoshka=[]))
    free.embed("abc", pooling_params=PoolingParams(dimensions=3))
    with pytest.raises(ValidationError, match="at most 8"):
        free.embed("abc", pooling_params=PoolingParams(dimensions=9))
    labels, _ = made(folder, CLASSIFIES)
    with pytest.raises(ValidationError, match="does not have"):
        labels.classify("abc", pooling_params=PoolingParams(dimensions=3))


def test_tasks_and_the_prefix_cache(folder):
    llm, client = made(folder)
    (found,) = llm.encode("abc")
    assert found.outputs.data.shape == (SIZE,)
    assert client.asked[-1].params.task == "embed"
    assert not client.asked[-1].params.skip_reading_prefix_cache
    (found,) = llm.encode("abc", pooling_task="token_embed")
    assert np.array_equal(found.outputs.data.numpy(), rows_of(ids("abc")))
    assert client.asked[-1].params.skip_reading_prefix_cache
    with pytest.raises(ValidationError, match=r"embed: LLM\.embed, or /v1/embeddings"):
        llm.encode("abc", pooling_task="classify")
    with pytest.raises(ValidationError, match=r"LLM\.classify needs a model for classify"):
        llm.classify("abc")
    with pytest.raises(ValidationError, match="leave one of them out"):
        llm.encode("abc", PoolingParams(task="embed"), pooling_task="token_embed")
    assert llm.supported_tasks == ("embed", "token_embed")


def test_classify_and_reward(folder):
    llm, _ = made(folder, CLASSIFIES)
    (found,) = llm.classify("abc")
    assert found.outputs.probs == numbers_of(ids("abc"), PoolingParams(), 3).tolist()
    assert found.outputs.num_classes == 3
    (raw,) = llm.classify("abc", pooling_params=PoolingParams(use_activation=False))
    assert raw.outputs.probs != found.outputs.probs
    (found,) = llm.reward("abc")  # the old name of both tasks of numbers
    assert found.outputs.data.shape == (3,)
    with pytest.raises(ValidationError, match="scores need"):
        llm.score("a", "b")


def test_a_cross_encoder_reads_both_texts(folder):
    llm, client = made(folder, RANKS)
    found = llm.score("abc", ["xy", "abc"])
    assert [one.tokens for one in client.asked] == [pair("abc", "xy"), pair("abc", "abc")]
    assert [one.params.second_text for one in client.asked] == [5, 5]
    expected = [
        numbers_of(pair("abc", text), PoolingParams(second_text=5), 1)[0] for text in ("xy", "abc")
    ]
    assert [one.outputs.score for one in found] == [pytest.approx(score) for score in expected]
    llm.score(["a", "b"], [{"content": [{"type": "text", "text": "c"}]}, "d"])
    assert client.asked[-1].tokens == pair("b", "d")
    for shape in ((["a", "b"], "c"), (["a", "b"], ["c", "d", "e"])):
        with pytest.raises(ValidationError, match="one for all, or as many"):
            llm.score(*shape)
    with pytest.raises(Unsupported, match="pictures in pairs for a model that reads both texts"):
        llm.score("a", {"content": [{"type": "image_url", "image_url": {}}]})


def test_pairs_are_cut_and_truncated(folder):
    llm, client = made(folder, RANKS)
    more = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    llm.score("abcd", "vwxyz", pooling_params=PoolingParams(extra_kwargs=more))
    assert client.asked[-1].tokens == pair("ab", "vwx")
    for room, first, second in ((8, "abc", "vw"), (6, "ab", "v")):
        llm.score("abcd", "vw", tokenization_kwargs={"truncate_prompt_tokens": room})
        assert client.asked[-1].tokens == pair(first, second), room
    with pytest.raises(ValidationError, match="max_tokens_per_doc must be less"):
        llm.score("a", "b", pooling_params=PoolingParams(extra_kwargs={"max_tokens_per_doc": 32}))


def test_token_types_of_a_prompt_travel(folder):
    llm, client = made(folder, RANKS)
    given = {"prompt_token_ids": pair("ab", "cd"), "token_type_ids": [0, 0, 0, 0, 1, 1, 1]}
    (found,) = llm.classify(given)
    assert client.asked[-1].params.second_text == 4
    expected = numbers_of(pair("ab", "cd"), PoolingParams(second_text=4), 1)
    assert found.outputs.probs == expected.tolist()
    for side, start in (("right", 0), ("left", 1)):
        llm.classify(
            given, tokenization_kwargs={"truncate_prompt_tokens": 4, "truncation_side": side}
        )
        assert client.asked[-1].params.second_text == start


def test_templates_and_concatenation_of_pairs(folder):
    plain, client = made(folder, replace(RANKS, use_sep_token=False))
    plain.score("ab", "cd")
    assert client.asked[-1].tokens == ids("abcd")
    with pytest.raises(ValidationError, match="--chat-template"):
        plain.score("ab", "cd", instruction="x")
    plain.score("ab", "cd", chat_template=PAIR_TEMPLATE, instruction="go")
    assert client.asked[-1].tokens == ids("q:abd:cdgo")
    own, client = made(folder, RANKS, chat_template=PAIR_TEMPLATE)
    own.score("ab", "cd", chat_template_kwargs={"instruction": "no"}, instruction="go")
    assert client.asked[-1].tokens == ids("q:abd:cdno")


def test_scores_of_vectors(folder):
    llm, client = made(folder)
    found = llm.score("abc", ["abd", "xyz"])
    assert len(client.asked) == 3  # the query's vector is computed once
    vectors = llm.embed(["abc", "abd", "xyz"])
    query, *documents = [np.array(one.outputs.embedding, np.float32) for one in vectors]
    assert [one.outputs.score for one in found] == [float(query @ one) for one in documents]
    assert found[0].prompt_token_ids == ids("abc") + ids("abd")
    late, _ = made(folder, replace(EMBEDS, tasks=["token_embed"]))
    (found,) = late.score("abc", "abx")
    query, document = rows_of(ids("abc")), rows_of(ids("abx"))
    assert found.outputs.score == float((query @ document.T).max(1).sum())


def test_long_texts_are_embedded_in_pieces(folder):
    info = replace(EMBEDS, chunked=True, max_embed_len=20)
    llm, client = made(folder, info, max_model_len=8)
    (found,) = llm.embed("abcdefghijklmno")
    assert [len(one.tokens) for one in client.asked] == [8, 8, 1]
    assert [id for one in client.asked for id in one.tokens] == ids("abcdefghijklmno")
    mean = sum(len(one.tokens) * vector_of(one.tokens).astype(np.float64) for one in client.asked) / 17  # fmt: skip
    assert found.outputs.embedding == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)
    assert len(found.prompt_token_ids) == 17
    (raw,) = llm.embed("abcdefghijklmno", pooling_params=PoolingParams(use_activation=False))
    counts = vector_of(ids("abcdefghijklmno"), PoolingParams(use_activation=False))
    weighted = sum(len(one.tokens) * vector_of(one.tokens, one.params) for one in client.asked[3:]) / 17  # fmt: skip
    assert raw.outputs.embedding == pytest.approx(weighted)
    assert len(raw.outputs.embedding) == len(counts)
    with pytest.raises(ValidationError, match="length is 20 tokens: an input has 22"):
        llm.embed("abcdefghijklmnopqrst")
    with pytest.raises(ValidationError, match="length is 8 tokens"):
        llm.encode("abcdefgh", pooling_task="token_embed")


def test_prompts_of_the_model(folder):
    info = replace(EMBEDS, prompts={"query": "q: ", "passage": "p: "})
    llm, client = made(folder, info, default_prompt_name="query")
    assert llm.front.pooling is not None
    (prompt,) = llm.front.pooling.with_prompt(None, ["abc"])
    assert prompt.text == "q: abc"
    (prompt,) = llm.front.pooling.with_prompt("passage", ["abc"])
    assert (prompt.text, prompt.pool_from) == ("p: abc", 0)
    without, client = made(folder, replace(info, include_prompt=False))
    assert without.front.pooling is not None
    without.encode(without.front.pooling.with_prompt("query", ["abc"]))
    assert client.asked[-1].params.pool_from == 3  # [CLS] q :
    with pytest.raises(ValidationError, match="it has 'query', 'passage', not 'x'"):
        made(folder, info, default_prompt_name="x")


def test_the_wrong_kind_of_call_names_the_right_one(folder):
    llm, _ = made(folder)
    for call in (llm.generate, lambda text: llm.chat([{"role": "user", "content": text}])):
        with pytest.raises(
            ValidationError,
            match=r"^LLM\.(generate|chat).* computes vectors .*LLM\.embed, or /v1/embeddings",
        ):
            call("abc")
    generating, _ = made(folder, None)
    for call in (generating.embed, generating.encode, generating.classify, generating.reward):
        with pytest.raises(ValidationError, match=r"LLM\.generate and LLM\.chat"):
            call("abc")
    with pytest.raises(ValidationError, match="pooling model"):
        generating.score("a", "b")


def test_an_error_of_the_engine_leaves_nothing_behind(folder):
    llm, client = made(folder)
    client.refused[5] = "odd"
    with pytest.raises(ValidationError, match="odd"):
        llm.embed(["abc"] * 9)
    assert not llm.has_unfinished_requests()
    assert [one.outputs.embedding for one in llm.embed(["abc", "b"])] == [
        vector_of(ids("abc")).tolist(), vector_of(ids("b")).tolist(),
    ]  # fmt: skip


def test_progress_counts_prompts(folder):
    seen: list[int] = []

    class Bar:
        format_dict: dict[str, float] = {}  # noqa: RUF012

        def __init__(self, **options: object):
            seen.append(int(str(options["total"])))

        def update(self, count: int) -> None:
            seen.append(count)

        def close(self) -> None:
            seen.append(-1)

    llm, _ = made(folder)
    llm.embed(["a", "b", "c"], use_tqdm=Bar)
    assert seen == [3, 1, 1, 1, -1]
