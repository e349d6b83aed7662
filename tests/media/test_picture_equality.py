"""Tokens and logits of prompts with pictures, compared with Transformers' own, in every way in which an engine can compute them.

The peer gets the pixels of Transformers' own processor, called in this process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_checkpoints
from vision_checkpoints import CHECKPOINTS, picture

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ValidationError
from quire.frontend.media.media_process import load_processor
from quire.frontend.media.prompt_reader import media_inputs

COUNT = 10
SLOW = pytest.mark.slow
KINDS = tuple(CHECKPOINTS)
CORE = ("llava", "qwen2_vl", "idefics3")
"""One row of tiles, positions of a grid, several runs of rows with text between them."""
JOINTS = ("qwen3_vl", "gemma3", "gemma4_both_ways")
"""States of the tower that inner layers take, tokens that see later ones in all layers, and in layers with windows."""
WHOLE = {"gemma3": 20, "gemma4_both_ways": 71, "paligemma": 64}
"""Steps of fewer tokens are refused: they must have all of a picture."""
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
WIDE = {"width": 150, "height": 90}


@cache
def processor(path: str) -> Any:
    return load_processor(path)


def prompt_of(kind: str, text: str) -> str:
    """`@` in the text stands for a picture."""
    return "<s>" + text.replace("@", CHECKPOINTS[kind]["placeholder"])


def given(kind: str, text: str, pictures: Sequence[Any]) -> dict[str, Any]:
    return {"prompt": prompt_of(kind, text), "multi_modal_data": {"image": list(pictures)}}


def peer(
    path: str, kind: str, text: str, pictures: Sequence[Any]
) -> tuple[list[int], list[int], Any]:
    """(the prompt's tokens, greedy tokens, logits of the first of these) by Transformers."""
    inputs = processor(path)(images=list(pictures), text=[prompt_of(kind, text)], return_tensors="pt", add_special_tokens=False)  # fmt: skip
    with torch.inference_mode():
        out = vision_checkpoints.transformers_model(path).generate(
            **inputs, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    prompt = inputs["input_ids"][0].tolist()
    return prompt, out.sequences[0, len(prompt) :].tolist(), out.logits[0][0]


def tokens(llm: Any, *prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [
        list(one.outputs[0].token_ids)
        for one in llm.generate(list(prompts), params, use_tqdm=False)
    ]


def passes(llm: Any) -> int:
    """How many pictures the tower has encoded in this test."""
    return vision_checkpoints.encoder_passes(llm) - int(llm.passes_before)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "impl"), [*((kind, "auto") for kind in KINDS), *((kind, "transformers") for kind in CORE)])  # fmt: skip
def test_tokens_and_logits_are_those_of_transformers(
    kind, impl, engine: Callable[..., Any], checkpoint
):
    text, pictures = "What is in @ and @? Say it.", [picture(1, **WIDE), picture(2)]
    prompt, expected, logits_V = peer(checkpoint(kind), kind, text, pictures)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=20)
    with engine(kind, model_impl=impl) as llm:
        (out,) = llm.generate([given(kind, text, pictures)], params, use_tqdm=False)
    assert out.prompt_token_ids == prompt
    assert list(out.outputs[0].token_ids) == expected
    logprobs_V = logits_V.float().log_softmax(-1)
    for token, entry in out.outputs[0].logprobs[0].items():
        assert abs(entry.logprob - float(logprobs_V[token])) < 1e-3


@pytest.mark.parametrize("text", ["@", "@@", "@ is first", "the last is @", "a@b@c@"])
@pytest.mark.parametrize("kind", CORE)
def test_pictures_at_every_place(kind, text, engine, checkpoint):
    pictures = [picture(n, 60 + 30 * n, 60) for n in range(text.count("@"))]
    with engine(kind) as llm:
        assert (
            tokens(llm, given(kind, text, pictures))[0]
            == peer(checkpoint(kind), kind, text, pictures)[1]
        )


def quick_or_slow(*more: Any) -> list[Any]:
    """A case for each kind; those that no joint of the engine needs are slow."""
    return [pytest.param(kind, *more, marks=() if kind in (*CORE, *JOINTS) else SLOW) for kind in KINDS]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "chunk"), [*quick_or_slow(5), *((kind, n) for kind in CORE for n in (1, 16))])  # fmt: skip
def test_a_step_may_end_inside_a_picture(kind, chunk, engine, checkpoint):
    text, pictures = "see @ and also @ now", [picture(1, **WIDE), picture(2)]
    with engine(kind, long_prefill_token_threshold=max(chunk, WHOLE.get(kind, 0))) as llm:
        assert (
            tokens(llm, given(kind, text, pictures))[0]
            == peer(checkpoint(kind), kind, text, pictures)[1]
        )
        assert passes(llm) == 2


@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen2_vl", marks=SLOW)])
def test_a_step_ends_at_every_token_of_a_picture(kind, engine, checkpoint):
    """Steps of 19 tokens, after 0 to 18 letters: the first step ends at each token of the picture, and before and after it."""
    pictures = [picture(1, **WIDE)]
    with engine(kind, long_prefill_token_threshold=19, enable_prefix_caching=False) as llm:
        for letters in range(19):
            text = "abcdefghijklmnopqrs"[:letters] + "@ what?"
            assert (
                tokens(llm, given(kind, text, pictures))[0]
                == peer(checkpoint(kind), kind, text, pictures)[1]
            )


@pytest.mark.parametrize("kind", ["gemma3", "gemma4_both_ways", "paligemma"])
def test_a_text_alone_is_causal(kind, engine, checkpoint):
    """Of models whose pictures, or prompts with pictures, attend in both directions; also after a request with a picture."""
    prompt, text = "<s>a text of several words without a picture", "here is @ now"
    model = vision_checkpoints.transformers_model(checkpoint(kind))
    ids = processor(checkpoint(kind)).tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]  # fmt: skip
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
    with engine(kind) as llm:
        alone = tokens(llm, prompt)
        tokens(llm, given(kind, text, [picture(1)]))
        beside = tokens(llm, prompt, given(kind, text, [picture(2)]))
    assert alone[0] == beside[0] == out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", CORE)
def test_beside_texts_and_other_pictures(kind, engine, checkpoint):
    texts = ["first @ picture", "no picture at all", "@@ two", "the first again: @"]
    all_pictures = [[picture(1)], [], [picture(2), picture(3, **WIDE)], [picture(1)]]
    expected = [
        peer(checkpoint(kind), kind, t, p)[1] for t, p in zip(texts, all_pictures, strict=True) if p
    ]
    prompts = [given(kind, t, p) for t, p in zip(texts, all_pictures, strict=True)]
    with engine(kind, max_num_batched_tokens=48) as llm:
        alone = tokens(llm, prompts[1])
        found = tokens(llm, *prompts)
    assert [found[0], *found[2:]] == expected
    assert found[1] == alone[0]


@pytest.mark.parametrize("kind", quick_or_slow())
def test_a_second_question_about_a_picture_needs_no_tower(kind, engine, checkpoint):
    pictures = [picture(4, **WIDE)]
    first, second = "a picture: @ which colour?", "a picture: @ which shape, please?"
    with engine(kind) as llm:
        tokens(llm, given(kind, first, pictures))
        (out,) = llm.generate([given(kind, second, pictures)], GREEDY, use_tqdm=False)
        assert passes(llm) == 1
        assert out.num_cached_tokens >= 16 or kind in (
            "qwen3_5",
            "paligemma",
        )  # its states are copied every 64 tokens; its prompt is another
        assert list(out.outputs[0].token_ids) == peer(checkpoint(kind), kind, second, pictures)[1]


@pytest.mark.parametrize("kind", [*CORE, "qwen3_5"])
def test_the_same_text_with_another_picture_shares_nothing(kind, engine, checkpoint):
    text = "@ which colour has this?"
    with engine(kind) as llm:
        for number in (5, 6):
            (out,) = llm.generate([given(kind, text, [picture(number)])], GREEDY, use_tqdm=False)
            assert out.num_cached_tokens == 0
            assert (
                list(out.outputs[0].token_ids)
                == peer(checkpoint(kind), kind, text, [picture(number)])[1]
            )


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_5"])
def test_long_prefixes_with_pictures(kind, engine, checkpoint):
    """Of the hybrid model, copies of the states are found too, but only after the same picture."""
    words = "a few words that fill more than one block, and then some more words; "
    first, second = f"{words}@{words}{words}which colour?", f"{words}@{words}{words}what else?"
    cases = [(first, 1, 0), (first, 2, 64), (second, 1, 128), (second, 2, 128)]
    with engine(kind) as llm:
        for text, number, least in cases:
            pictures = [picture(number, **WIDE)]
            (out,) = llm.generate([given(kind, text, pictures)], GREEDY, use_tqdm=False)
            assert out.num_cached_tokens >= least
            assert (
                out.num_cached_tokens < 71 or text == second
            )  # other pictures share the words before
            assert list(out.outputs[0].token_ids) == peer(checkpoint(kind), kind, text, pictures)[1]


def test_another_salt_shares_neither_blocks_nor_encoded_pictures(engine):
    prompt = given("llava", "@ which colour has this?", [picture(5)])
    with engine("llava") as llm:
        first = tokens(llm, prompt | {"cache_salt": "a"})
        (out,) = llm.generate([prompt | {"cache_salt": "b"}], GREEDY, use_tqdm=False)
        assert (out.num_cached_tokens, passes(llm)) == (0, 2)
        assert list(out.outputs[0].token_ids) == first[0]


def test_a_step_that_cannot_have_a_whole_picture_is_an_error_at_the_start(checkpoint):
    with pytest.raises(ConfigError, match="16 tokens, and long_prefill_token_threshold=5: raise it to 16"):  # fmt: skip
        LLM(
            checkpoint("gemma3"), dtype="float32", max_model_len=512, long_prefill_token_threshold=5
        )


def test_a_prefix_hit_that_ends_inside_a_picture_that_sees_itself(engine, checkpoint):
    """Blocks of 16 end inside the picture of 16 tokens; only the rest of it is computed again."""
    text = "a@b"
    with engine("gemma3") as llm:
        first = tokens(llm, given("gemma3", text, [picture(5)]))
        (out,) = llm.generate([given("gemma3", text, [picture(5)])], GREEDY, use_tqdm=False)
        assert out.num_cached_tokens == 16
        assert list(out.outputs[0].token_ids) == first[0]
        assert first[0] == peer(checkpoint("gemma3"), "gemma3", text, [picture(5)])[1]


def test_a_prompt_that_attends_in_both_directions(engine, checkpoint):
    """The keys of such a prompt depend on all tokens of the prompt: an equal prompt finds the keys, and a prompt with the same beginning does
    not. A prompt that is longer than a step is refused."""
    pictures = [picture(5)]
    texts = ["@ which colour?", "@ which colours?", "@ which colour?@"]
    with engine("paligemma", hf_overrides={"text_config": {"sliding_window": 512}}) as llm:

        def asked(text: str) -> tuple[int, list[int]]:
            prompt = given("paligemma", text, pictures * text.count("@"))
            (out,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            return out.num_cached_tokens, list(out.outputs[0].token_ids)

        first = {text: asked(text) for text in texts}
        assert [cached for cached, _ in first.values()] == [0, 0, 0]
        again = {text: asked(text) for text in texts}
        assert [cached for cached, _ in again.values()] == [32, 32, 48]
        assert [found for _, found in again.values()] == [found for _, found in first.values()]
        with pytest.raises(ValidationError, match=r"65 tokens, a step at most 64 \(--max-num-batched-tokens\)"):  # fmt: skip
            llm.generate([given("paligemma", "@" + "a" * 46, pictures)], GREEDY, use_tqdm=False)
        assert tokens(llm, "<s>text")


def test_a_chat_of_paligemma_with_the_template_of_the_page(engine):
    page = (Path(__file__).parents[2] / "docs/multimodal.md").read_text()
    template = page.partition("```jinja\n")[2].partition("```")[0].strip()
    parts = [{"type": "text", "text": "caption en"}, {"type": "image_pil", "image_pil": picture(1)}]
    prompt = {"prompt": "<image>caption en", "multi_modal_data": {"image": picture(1)}}
    with engine("paligemma") as llm:
        (chat,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False, chat_template=template)  # fmt: skip
        (plain,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert chat.prompt_token_ids == plain.prompt_token_ids
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize("kind", ["llava", "gemma3", *(pytest.param(kind, marks=SLOW) for kind in ("qwen2_vl", "idefics3", "qwen3_vl", "gemma4_both_ways", "paligemma"))])  # fmt: skip
def test_preempted_requests_continue_with_the_same_tokens(kind, engine, checkpoint):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [given(kind, f"{n} of @ follows", [picture(n, **WIDE)]) for n in range(4)]
    with engine(kind) as llm:
        expected = [tokens(llm, one, params=params)[0] for one in prompts]
    blocks = {"gemma4_both_ways": 26, "gemma3": 14, "paligemma": 14}.get(kind, 12)
    with engine(kind, num_gpu_blocks_override=blocks, enable_prefix_caching=False) as llm:
        assert tokens(llm, *prompts, params=params) == expected
        assert sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions") > 0
    assert (
        expected[0][:COUNT]
        == peer(checkpoint(kind), kind, "0 of @ follows", [picture(0, **WIDE)])[1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_beside_speculation_and_after_deep_sleep(kind, engine, checkpoint):
    text, pictures = "see @ see see see see", [picture(1)]
    expected = peer(checkpoint(kind), kind, text, pictures)[1]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with engine(kind, speculative_config=speculation) as llm:
        assert tokens(llm, given(kind, text, pictures))[0] == expected
        llm.sleep(level=2)
        llm.wake_up()
        assert tokens(llm, given(kind, text, pictures))[0] == expected
        assert passes(llm) == 2  # the cache was emptied with the weights


def test_whole_pictures_in_a_step(engine, checkpoint):
    text, pictures = "here is @ and then @ too", [picture(1), picture(2)]
    with engine("llava", disable_chunked_mm_input=True, max_num_batched_tokens=20) as llm:
        assert (
            tokens(llm, given("llava", text, pictures))[0]
            == peer(checkpoint("llava"), "llava", text, pictures)[1]
        )


def test_a_small_encoder_cache_encodes_again(engine, checkpoint):
    """The cache holds 20 rows, a picture has 16: the second one evicts the first, which a later step needs again."""
    text, pictures = "@ and @", [picture(1), picture(2)]
    options = {
        "max_num_batched_tokens": 20,
        "long_prefill_token_threshold": 5,
        "enable_prefix_caching": False,
    }
    with engine("llava", **options) as llm:
        prompts = [given("llava", text, pictures), given("llava", text, pictures[::-1])]
        found = tokens(llm, *prompts)
    assert found[0] == peer(checkpoint("llava"), "llava", text, pictures)[1]
    assert found[1] == peer(checkpoint("llava"), "llava", text, pictures[::-1])[1]


def test_bytes_of_the_encoder_cache(engine):
    def values(llm: Any) -> tuple[float, float]:
        found = {
            m.name: m.value for m in llm.get_metrics() if m.name.startswith("quire:encoder_cache")
        }
        return found["quire:encoder_cache_bytes"], found["quire:encoder_cache_bytes_max"]

    with engine("llava") as llm:
        tokens(llm, given("llava", "@ and @", [picture(1), picture(2)]))
        assert values(llm) == (2 * 16 * 64 * 4, 64 * 64 * 4)
        llm.reset_encoder_cache()
        assert values(llm)[0] == 0


def test_several_completions_of_a_picture(engine):
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=COUNT, ignore_eos=True)
    one = SamplingParams(temperature=1.0, seed=7, max_tokens=COUNT, ignore_eos=True)
    prompt = given("llava", "@ tell me", [picture(1)])
    with engine("llava") as llm:
        (out,) = llm.generate([prompt], params, use_tqdm=False)
        assert list(out.outputs[0].token_ids) == tokens(llm, prompt, params=one)[0]
        assert len({tuple(each.token_ids) for each in out.outputs}) == 3
        assert passes(llm) == 1


def test_a_published_config_without_text_config(tmp_path, same_process, checkpoint):
    """The values of the language model are beside vision_config, as in Qwen2-VL's and Qwen2.5-VL's repositories."""
    path = checkpoint("qwen2_vl")
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    inner = config.pop("text_config")
    (tmp_path / "config.json").write_text(json.dumps({**inner, **config}))
    text, pictures = "see @ here", [picture(1, **WIDE)]
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, block_size=16) as llm:
        media_inputs(llm.front).processes = same_process(path)
        assert (
            tokens(llm, given("qwen2_vl", text, pictures))[0]
            == peer(path, "qwen2_vl", text, pictures)[1]
        )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("llava", "data"), ("qwen2_vl", "weights"), ("qwen2_vl", "data"), ("vipllava", "data")])  # fmt: skip
def test_two_ranks_compute_the_same_tokens(kind, mode, engine, checkpoint):
    text, pictures = "see @ and @ here", [picture(1, **WIDE), picture(2)]
    with engine(kind, tensor_parallel_size=2, mm_encoder_tp_mode=mode) as llm:
        assert (
            tokens(llm, given(kind, text, pictures))[0]
            == peer(checkpoint(kind), kind, text, pictures)[1]
        )
