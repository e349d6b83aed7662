"""`trace_decode_token_ids`: the tokens are given, the scores are the model's."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.errors import ValidationError

PROMPT = "Once upon a time"
TRACE = [322, 446, 0, 380, 403, 16]  # 0 is the end-of-text token


def scores(output) -> list[tuple[int, float, int | None]]:
    return [
        (token, entry[token].logprob, entry[token].rank)
        for token, entry in zip(output.token_ids, output.logprobs, strict=True)
    ]


@pytest.fixture(scope="module", params=[{}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}], ids=["plain", "drafts"])  # fmt: skip
def llm(request):
    with LLM("quire-tiny", max_model_len=128, enable_trace_replay=True, **request.param) as made:
        yield made


def test_the_output_is_the_trace(llm):
    params = SamplingParams(trace_decode_token_ids=TRACE, logprobs=2, stop=["e"], min_tokens=3)
    plain = SamplingParams(temperature=0, max_tokens=4)
    traced, free = llm.generate([PROMPT, PROMPT], [params, plain], use_tqdm=False)
    output = traced.outputs[0]
    assert list(output.token_ids) == TRACE
    assert output.finish_reason == "length"
    assert list(free.outputs[0].token_ids) != TRACE[:4]
    assert any(rank > 1 for _, _, rank in scores(output))


def test_the_scores_of_an_output_are_those_of_its_trace(llm):
    """Greedy, so each token has rank 1, and the same score in bits."""
    first = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    (given,) = llm.generate([PROMPT], first, use_tqdm=False)
    for temperature in (0, 1):
        again = SamplingParams(trace_decode_token_ids=list(given.outputs[0].token_ids), temperature=temperature, logprobs=1, seed=3)  # fmt: skip
        (traced,) = llm.generate([PROMPT], again, use_tqdm=False)
        assert scores(traced.outputs[0]) == scores(given.outputs[0])


def test_the_scores_of_a_trace_are_those_of_a_prompt(llm):
    tokens = llm.get_tokenizer().encode(PROMPT)
    params = SamplingParams(trace_decode_token_ids=TRACE, logprobs=0)
    (traced,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (prompt,) = llm.generate([{"prompt_token_ids": tokens + TRACE}], scored, use_tqdm=False)
    places = prompt.prompt_logprobs[len(tokens) :]
    for (token, logprob, rank), place in zip(scores(traced.outputs[0]), places, strict=True):
        assert rank == place[token].rank
        assert logprob == pytest.approx(place[token].logprob, abs=0.05)


def test_a_trace_ends_where_the_context_or_max_tokens_ends(llm):
    long = SamplingParams(trace_decode_token_ids=[5] * 400, max_tokens=None)
    (traced,) = llm.generate([PROMPT], long, use_tqdm=False)
    output = traced.outputs[0]
    assert list(output.token_ids) == [5] * (128 - len(traced.prompt_token_ids))
    short = SamplingParams(trace_decode_token_ids=TRACE, max_tokens=2)
    assert list(llm.generate([PROMPT], short, use_tqdm=False)[0].outputs[0].token_ids) == TRACE[:2]


def test_a_forbidden_token_comes_too(llm):
    params = SamplingParams(trace_decode_token_ids=TRACE, logit_bias={TRACE[1]: -100.0}, repetition_penalty=1.5)  # fmt: skip
    assert list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids) == TRACE


def test_what_a_trace_cannot_have(llm):
    for more in (
        {"n": 2}, {"prompt_logprobs": 1}, {"bad_words": ["a"]}, {"allowed_token_ids": [1]}, {"thinking_token_budget": 3},
        {"structured_outputs": {"regex": "a"}},
    ):  # fmt: skip
        with pytest.raises(ValidationError, match=next(iter(more))):
            SamplingParams(trace_decode_token_ids=TRACE, **more)
    for wrong in ([], [-1], "abc", [1 << 40]):
        with pytest.raises(ValidationError, match="trace_decode_token_ids"):
            SamplingParams(trace_decode_token_ids=wrong)
    with pytest.raises(ValidationError, match="trace_decode_token_ids"):
        llm.generate([PROMPT], SamplingParams(trace_decode_token_ids=[1 << 30]), use_tqdm=False)


def test_scores_of_a_trace_are_raw():
    with LLM("quire-tiny", max_model_len=64, logprobs_mode="processed_logprobs") as made:
        with pytest.raises(ValidationError, match="logprobs_mode=raw_logprobs"):
            made.generate([PROMPT], SamplingParams(trace_decode_token_ids=TRACE, logprobs=1))
        params = SamplingParams(trace_decode_token_ids=TRACE)
        (output,) = made.generate([PROMPT], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == TRACE
