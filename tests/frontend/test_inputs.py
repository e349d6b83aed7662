"""From a prompt and its parameters to what the engine is asked: every form, every limit, every default."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import small_tokenizers

from quire.config.model import ModelConfig
from quire.errors import ConfigError, Unsupported, ValidationError
from quire.frontend.generation_config import GenerationDefaults, generation_defaults
from quire.frontend.input_processor import AcceptedRequest, InputProcessor, TokenizeOptions
from quire.frontend.parallel_sampling import derive_seed, fan_out, top_n
from quire.frontend.prompts import Prompt, read_prompt, read_prompts
from quire.frontend.tokenizer import Tokenizer, load
from quire.protocol.request import ToEngine
from quire.protocol.sampling_params import SamplingParams

MAX_LEN = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(small_tokenizers.save_byte_level(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(tokenizer, MAX_LEN, len(tokenizer))


def accept(inputs: InputProcessor, prompt: Any = "the cat", **given: Any) -> AcceptedRequest:
    options = {key: given.pop(key) for key in list(given) if key in OPTIONS}
    return inputs.accept(prompt, SamplingParams(**given), id="r", **options)


OPTIONS = ("priority", "tokenization_kwargs", "is_subrequest")


# -- prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("the", "the", None),
        ({"prompt": "the"}, "the", None),
        ([3, 4], None, [3, 4]),
        ((3, 4), None, [3, 4]),
        (np.array([3, 4]), None, [3, 4]),
        ({"prompt_token_ids": [3, 4]}, None, [3, 4]),
        ({"prompt_token_ids": [3, 4], "prompt": "said"}, "said", [3, 4]),
        ({"prompt": "the", "multi_modal_data": None, "mm_processor_kwargs": {}}, "the", None),
    ],
)
def test_every_form_of_a_prompt(
    inputs: InputProcessor, tokenizer: Tokenizer, prompt: Any, text: str, ids: Any
):
    accepted = accept(inputs, prompt)
    assert accepted.prompt == text
    assert accepted.tokens == (ids or tokenizer.encode("the"))
    assert [child.tokens for child in accepted.children] == [accepted.tokens]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "must be a string"),
        ({}, "must have prompt"),
        ({"prompt": 3}, "must be a string, not int"),
        ({"prompt_token_ids": ["a"]}, "whole numbers"),
        ({"prompt_token_ids": []}, "empty"),
        ({"text": "x"}, "unknown key text; the keys are prompt"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt must be"),
        ({"prompt": "x", "cache_salt": "s" * 129}, "cache_salt must be"),
        (3, "must be a string"),
        (None, "must be a string"),
        (["a", "b"], "must be a string"),
        ([-1], "-1, which is not a token id"),
        ([100_000], "ids are 0 to"),
        ([1] * MAX_LEN, "maximum context length is 40 tokens: the prompt has 40"),
        ("x" * 100_000, "100000 characters cannot fit"),
    ],
)
def test_prompts_that_cannot_be_served(inputs: InputProcessor, prompt: Any, words: str):
    with pytest.raises(ValidationError, match=words) as caught:
        accept(inputs, prompt)
    assert caught.value.parameter


@pytest.mark.parametrize("name", ["media_io_kwargs", "data"])
def test_later_prompts_are_refused_by_name(inputs: InputProcessor, name: str):
    with pytest.raises(Unsupported, match=name):
        accept(inputs, {"prompt": "x", name: {"image": 1}})


def test_pictures_for_a_model_of_texts_are_refused(inputs: InputProcessor):
    for prompt in ({"prompt": "x"}, {"prompt_token_ids": [1]}):
        with pytest.raises(ValidationError, match="reads text only"):
            accept(inputs, {**prompt, "multi_modal_data": {"image": b"..."}})
        with pytest.raises(ValidationError, match="reads text only"):
            accept(inputs, {**prompt, "multi_modal_data": {"audio": b"..."}})
        with pytest.raises(ValidationError, match="reads text only"):
            accept(inputs, {**prompt, "multi_modal_data": {"video": b"..."}})
    with pytest.raises(Unsupported, match="hologram"):
        accept(inputs, {"prompt": "x", "multi_modal_data": {"hologram": b"..."}})
    with pytest.raises(ValidationError, match="a dict has the keys image_embeds, image_grid_thw"):
        accept(inputs, {"prompt": "x", "multi_modal_data": {"image": {"embeds": 1}}})


def test_token_types_are_those_of_a_pair(inputs: InputProcessor):
    pair = {"prompt_token_ids": [5, 6, 7], "token_type_ids": [0, 1, 1]}
    assert read_prompt(pair).second_text == 1
    assert read_prompt({**pair, "token_type_ids": [0, 0, 0]}).second_text == 0
    for types in ([0, 1], [1, 1, 1], [0, 1, 0], [0, 2, 2], {"image": 1}, "001"):
        with pytest.raises(ValidationError, match="token_type_ids must"):
            read_prompt({**pair, "token_type_ids": types})
    with pytest.raises(Unsupported, match="token_type_ids"):
        accept(inputs, pair)


def test_several_prompts_in_any_mixture():
    found = read_prompts(["a", [1, 2], {"prompt": "b"}, {"prompt_token_ids": [3]}])
    assert [(one.text, one.tokens) for one in found] == [
        ("a", []), (None, [1, 2]), ("b", []), (None, [3]),
    ]  # fmt: skip
    assert [one.tokens for one in read_prompts([1, 2])] == [[1, 2]]
    assert [one.tokens for one in read_prompts([[1], [2]])] == [[1], [2]]
    assert read_prompts([]) == []
    with pytest.raises(ValidationError, match="prompt 1: "):
        read_prompts(["a", 3.5])


def test_an_empty_list_of_ids_is_an_empty_prompt_also_beside_a_text(inputs: InputProcessor):
    with pytest.raises(ValidationError, match="prompt is empty"):
        accept(inputs, {"prompt": "the", "prompt_token_ids": []})


def test_a_prompt_is_tokenized_and_checked_once(inputs: InputProcessor):
    """The server asks for the tokens first; `accept` takes them as they are."""
    long, too_long = Prompt("the " * 30), [1] * MAX_LEN
    first = inputs.tokenize(Prompt("the"))
    assert (first.is_checked, first.text) == (True, "the")
    assert inputs.tokenize(first) is first
    assert accept(inputs, first).tokens is first.tokens
    with pytest.raises(ValidationError, match="maximum context length") as refused:
        inputs.tokenize(Prompt(None, too_long))
    assert refused.value.parameter == "input_tokens"
    counted = inputs.tokenize(Prompt(None, too_long), TokenizeOptions(fits_model=False))
    assert (counted.tokens, counted.is_checked) == (too_long, False)
    with pytest.raises(ValidationError, match="maximum context length"):
        accept(inputs, counted)
    cut = inputs.tokenize(long, TokenizeOptions(truncate=2))
    assert (len(cut.tokens), cut.text) == (2, None)
    with pytest.raises(ValidationError, match="prompt has -1") as refused:
        inputs.tokenize(Prompt(None, [-1]), TokenizeOptions(parameter="prompt"))
    assert refused.value.parameter == "prompt"


def test_a_text_of_too_many_bytes_is_not_tokenized(inputs: InputProcessor):
    inputs.max_text_bytes = 1000
    counted = TokenizeOptions(fits_model=False)
    cut = TokenizeOptions(truncate=5, fits_model=False)  # a part of it is tokenized
    for options, limit in ((counted, 1000), (cut, 4000)):
        assert inputs.tokenize(Prompt("a" * limit), options).tokens
        for text in ("a" * (limit + 1), "é" * (limit // 2 + 1)):
            with pytest.raises(ValidationError, match=f"bytes of UTF-8; the limit is {limit}"):
                inputs.tokenize(Prompt(text), options)


def test_the_salt_reaches_the_engine(inputs: InputProcessor):
    assert accept(inputs, {"prompt": "x", "cache_salt": "mine"}).children[0].salt == "mine"


def test_without_a_tokenizer_only_token_ids_are_accepted():
    inputs = InputProcessor(None, MAX_LEN, 50)
    assert accept(inputs, [1, 2]).tokens == [1, 2]
    for given, words in (
        ({}, "pass token ids"),
        ({"prompt": [1], "stop": "x"}, "stop needs a tokenizer"),
        ({"prompt": [1], "bad_words": ["x"]}, "bad_words needs a tokenizer"),
    ):
        with pytest.raises(ValidationError, match=words):
            accept(inputs, **given)


def test_truncation(inputs: InputProcessor):
    ids = list(range(60))

    def kept(**options: Any) -> list[int]:
        return accept(inputs, ids, tokenization_kwargs=options).tokens

    assert kept(truncate_prompt_tokens=3) == [57, 58, 59]
    assert kept(truncate_prompt_tokens=-1) == ids[-(MAX_LEN - 1) :]
    assert kept(truncate_prompt_tokens=3, truncation_side="right") == [0, 1, 2]
    assert kept(truncation=True, max_length=3) == [0, 1, 2]
    assert accept(inputs, ids, truncate_prompt_tokens=2).tokens == [58, 59]
    with pytest.raises(ValidationError, match="truncation_side"):
        kept(truncation_side="up")
    with pytest.raises(ValidationError, match="unknown key nonsense"):
        kept(nonsense=1)


def test_special_tokens_are_added_by_default(tmp_path: Path):
    tokenizer = load(small_tokenizers.save_byte_level(tmp_path, adds_bos=True))
    inputs = InputProcessor(tokenizer, MAX_LEN, len(tokenizer))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert accept(inputs, "the").tokens == [tokenizer.bos_token_id, *plain]
    options = {"add_special_tokens": False}
    assert accept(inputs, "the", tokenization_kwargs=options).tokens == plain


# -- parameters -------------------------------------------------------------------------------------


def test_max_tokens_defaults_to_the_remaining_context(inputs: InputProcessor):
    assert accept(inputs, [1] * 10, max_tokens=None).params.max_tokens == MAX_LEN - 10
    assert accept(inputs, [1] * 10, max_tokens=1000).params.max_tokens == MAX_LEN - 10
    assert accept(inputs, [1] * 10, max_tokens=5).params.max_tokens == 5
    assert accept(inputs, [1] * 39, max_tokens=5).children[0].params.max_tokens == 1
    with pytest.raises(ValidationError, match="room for 1"):
        accept(inputs, [1] * 39, max_tokens=5, min_tokens=2)


@pytest.mark.parametrize(
    "name", ["stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"]
)
def test_token_ids_are_the_models(inputs: InputProcessor, name: str):
    for token, fine in ((inputs.vocab_size - 1, True), (inputs.vocab_size, False)):
        value: Any = {token: 1.0} if name == "logit_bias" else [token]
        if fine:
            accept(inputs, **{name: value})
        else:
            with pytest.raises(ValidationError, match=f"{name} has {token}"):
                accept(inputs, **{name: value})


def test_logprobs_have_a_limit(inputs: InputProcessor):
    assert accept(inputs, logprobs=20).params.logprobs == 20
    for name in ("logprobs", "prompt_logprobs"):
        for count in (21, -1):
            with pytest.raises(
                ValidationError, match=f"{name}={count} is more than .* 20; .*top_logprobs"
            ):
                accept(inputs, **{name: count})
    assert accept(inputs, logprobs=50, is_subrequest=True).params.logprobs == 50
    inputs.max_logprobs = -1
    assert accept(inputs, logprobs=-1).params.logprobs == inputs.vocab_size


def test_ends_of_text_are_the_tokenizers_and_the_files(tokenizer: Tokenizer):
    defaults = GenerationDefaults(eos_token_ids=(5, 9999))
    inputs = InputProcessor(tokenizer, MAX_LEN, len(tokenizer), defaults)
    own = tokenizer.eos_token_id
    assert accept(inputs).children[0].params.eos_token_ids == sorted([5, own])


def test_bad_words_are_tokenized_with_and_without_a_space(
    inputs: InputProcessor, tokenizer: Tokenizer
):
    found = accept(inputs, bad_words=["the"]).children[0].params.bad_word_ids
    assert found == [
        tokenizer.encode("the"),
        tokenizer.encode(" the"),
    ]
    with pytest.raises(ValidationError, match="the limit is 128"):
        accept(inputs, bad_words=[f"w{i}" for i in range(100)])


def test_prompt_logprobs_do_not_read_the_prefix_cache(inputs: InputProcessor):
    def skips(**given: Any) -> Any:
        return accept(inputs, **given).children[0].params.skip_reading_prefix_cache

    assert skips() is False
    assert skips(prompt_logprobs=1) is True
    assert skips(prompt_logprobs=1, skip_reading_prefix_cache=False) is False
    assert skips(skip_reading_prefix_cache=True) is True


def test_seeds_are_derived_or_kept(inputs: InputProcessor, tokenizer: Tokenizer):
    assert accept(inputs, seed=5).children[0].params.seed == 5
    seeds = [accept(inputs).children[0].params.seed for _ in range(50)]
    assert len(set(seeds)) == 50
    # The same engine seed gives the same seeds again; another front room has others.
    again = InputProcessor(tokenizer, MAX_LEN, len(tokenizer))
    inputs_2 = InputProcessor(tokenizer, MAX_LEN, len(tokenizer), client=1)
    first = [accept(again).children[0].params.seed for _ in range(50)]
    assert set(first).isdisjoint(accept(inputs_2).children[0].params.seed for _ in range(50))
    fresh = InputProcessor(tokenizer, MAX_LEN, len(tokenizer))
    assert first == [accept(fresh).children[0].params.seed for _ in range(50)]


def test_arguments_are_not_modified(inputs: InputProcessor):
    params = SamplingParams(max_tokens=None, stop=["x"], logprobs=3)
    inputs.accept("the", params, id="r")
    assert params == SamplingParams(max_tokens=None, stop=["x"], logprobs=3)


def test_wrong_params_are_refused(inputs: InputProcessor):
    with pytest.raises(ValidationError, match="sampling_params"):
        inputs.accept("x", {"n": 1}, id="r")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="priority"):
        accept(inputs, priority="high")


# -- several outputs --------------------------------------------------------------------------------


def test_outputs_become_requests_of_their_own(inputs: InputProcessor):
    accepted = accept(inputs, n=3, seed=7, prompt_logprobs=1, logprobs=2)
    children = accepted.children
    assert [child.id for child in children] == ["r_0", "r_1", "r_2"]
    assert {child.params.n for child in children} == {1}
    assert children[0].params.seed == 7
    assert len({child.params.seed for child in children}) == 3
    assert [child.params.prompt_logprobs for child in children] == [1, None, None]
    assert {child.params.logprobs for child in children} == {2}
    assert accepted.params.n == 3


def test_best_of_requests_more_outputs_and_logprobs(inputs: InputProcessor):
    children = accept(inputs, n=2, best_of=4).children
    assert len(children) == 4
    assert {child.params.logprobs for child in children} == {0}
    assert {child.params.best_of for child in children} == {None}


def test_ranking():
    assert top_n([-3.0, -1.0, -2.0, -1.0], 3) == [1, 3, 2]


def test_mixing_spreads():
    assert len({derive_seed(seed, index) for seed in range(50) for index in range(50)}) == 2500
    assert all(0 <= derive_seed(index) < 1 << 63 for index in (-5, 0, 1 << 70))
    assert derive_seed(1, 2) != derive_seed(2, 1)


def test_a_single_output_keeps_the_request_id(inputs: InputProcessor):
    request = accept(inputs).children[0]
    assert [child.id for child in fan_out(request)] == ["r"]


# -- the checkpoint's defaults ----------------------------------------------------------------------


def defaults(tmp_path: Path, text: str | None, **asked: Any) -> GenerationDefaults:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    return generation_defaults(tmp_path, ModelConfig(**asked), {"eos_token_id": 2})


FILE = '{"temperature": 0.5, "top_k": 7, "max_new_tokens": 9, "eos_token_id": [3, 4], "foo": 1}'


def test_defaults_of_the_checkpoint(tmp_path: Path):
    found = defaults(tmp_path, FILE)
    assert found.sampling == {"temperature": 0.5, "top_k": 7, "max_tokens": 9}
    assert found.eos_token_ids == (3, 4)
    assert found.params().temperature == 0.5
    assert found.params(temperature=0.7, top_p=None).temperature == 0.7


def test_defaults_can_be_left_out_or_overridden(tmp_path: Path):
    for name in ("vllm", "quire"):
        found = defaults(tmp_path, FILE, generation_config=name)
        assert (found.sampling, found.eos_token_ids) == ({}, (3, 4))
    found = defaults(tmp_path, FILE, override_generation_config={"temperature": 0.9})
    assert found.sampling["temperature"] == 0.9


def test_defaults_of_another_directory(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"top_p": 0.25}')
    found = defaults(tmp_path, None, generation_config=str(tmp_path / "other"))
    assert (found.sampling, found.eos_token_ids) == ({"top_p": 0.25}, (2,))


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("not json", {}),
        ("[]", {}),
        ('{"temperature": 99}', {}),
        (None, {"generation_config": "/nowhere"}),
    ],
)
def test_invalid_generation_defaults_are_reported(
    tmp_path: Path, text: str | None, asked: dict[str, Any]
):
    with pytest.raises(ConfigError):
        defaults(tmp_path, text, **asked)


ODD: dict[str, list[Any]] = {
    "n": [3],
    "best_of": [2, 5],
    "temperature": [0.0, 0.5, 2.0],
    "top_k": [1, 1 << 40],
    "logprobs": [0, 2, True],
    "prompt_logprobs": [0, 3],
    "logprob_token_ids": [[], [1, 2], [1, 2, 3]],
    "min_tokens": [5],
    "max_tokens": [5, None],
    "stop": [["a"]],
    "stop_token_ids": [[1]],
    "bad_words": [["word"]],
    "detokenize": [False],
    "allowed_token_ids": [[1, 2]],
    "logit_bias": [{1: 50}],
    "seed": [-2, (1 << 63) - 1],
    "extra_args": [{"a": (1 << 64) - 1}],
    "repetition_detection": [{"max_pattern_size": 2, "min_count": 3}],
}


def test_accepted_requests_can_be_decoded_by_the_engine(inputs: InputProcessor):
    """All pairs of values. (best_of with logprob_token_ids could not be decoded, and was never answered.)"""
    decoder, taken = msgspec.msgpack.Decoder(ToEngine), 0
    rows = [(name, value) for name, values in ODD.items() for value in values]
    for (one, first), (other, second) in itertools.combinations(rows, 2):
        try:
            params = SamplingParams(**{one: first} | {other: second})
            accepted = inputs.accept({"prompt_token_ids": [1, 2]}, params, id="r")
        except ValidationError:
            continue
        for child in accepted.children:
            sent = decoder.decode(msgspec.msgpack.encode(child))
            assert sent == child, (one, first, other, second)
            assert sent.params.best_of is None
            taken += 1
    assert taken > 400


def test_best_of_with_logprob_token_ids_requests_no_logprobs(inputs: InputProcessor):
    params = SamplingParams(best_of=2, logprob_token_ids=[1, 2])
    accepted = inputs.accept({"prompt_token_ids": [1]}, params, id="r")
    assert [child.params.logprobs for child in accepted.children] == [None, None]


# -- parameters that a program changes ------------------------------------------------------------


def test_fields_set_after_construction_are_validated(inputs: InputProcessor):
    params = SamplingParams(max_tokens=4)
    params.top_k, params.stop, params.structured_outputs = -1, "ing", None
    accepted = inputs.accept("the cat", params, id="r")
    assert (accepted.params.top_k, accepted.params.stop) == (0, ["ing"])
    assert params.stop == "ing"  # the caller's object stays
    params.max_tokens = -5
    with pytest.raises(ValidationError) as caught:
        inputs.accept("the cat", params, id="r")
    assert caught.value.parameter == "max_tokens"


def test_the_engines_parameters_are_a_frozen_copy(inputs: InputProcessor):
    params = SamplingParams(max_tokens=4, n=2)
    first, second = inputs.accept("the cat", params, id="r").children
    params.max_tokens = 7
    assert first.params.max_tokens == second.params.max_tokens == 4
    with pytest.raises(AttributeError, match="max_tokens"):
        first.params.max_tokens = 7
    assert msgspec.structs.replace(first.params, max_tokens=7).max_tokens == 7
