"""Beam search against the plain algorithm, written out here over the model's own log-probabilities."""

from __future__ import annotations

from typing import Any

import page_model_engine
import pytest

from quire.api.llm import LLM
from quire.api.metrics import Counter, Histogram
from quire.errors import ValidationError
from quire.frontend.outputs import BeamSearchOutput
from quire.protocol.sampling_params import BeamSearchParams, SamplingParams


def model(llm: LLM) -> page_model_engine.Model:
    return llm.client.core.executor.model  # type: ignore[attr-defined]


def by_hand(
    llm: LLM, prompt: list[int], width: int, steps: int, penalty: float = 1.0,
    ends: tuple[int, ...] = (), with_end: bool = False,
) -> list[tuple[list[int], float]]:  # fmt: skip
    """Tokens and sum of log-probabilities of the best `width` sequences, best first."""
    beams = [(tuple(prompt), 0.0)]
    done: list[tuple[tuple[int, ...], float, int]] = []  # with the length that counts
    for _ in range(steps):
        nexts = []
        for tokens, total in beams:
            values = model(llm).logprobs(tokens)
            for token in sorted(range(len(values)), key=lambda t: -values[t])[: 2 * width]:
                if token in ends:
                    kept = (*tokens, token) if with_end else tokens
                    done.append((kept, total + values[token], len(tokens)))
                else:
                    nexts.append(((*tokens, token), total + values[token]))
        beams = sorted(nexts, key=lambda item: -item[1])[:width]
    found = done + [(tokens, total, len(tokens)) for tokens, total in beams]
    found.sort(key=lambda item: -item[1] / item[2] ** penalty)
    return [(list(tokens), total) for tokens, total, _ in found[:width]]


def told(output: BeamSearchOutput) -> list[tuple[list[int], Any]]:
    return [(one.tokens, pytest.approx(one.cum_logprob)) for one in output.sequences]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0])
def test_beam_search_equals_the_plain_algorithm(llm: LLM, width: int, penalty: float):
    prompts = [[4, 5], [9], [1, 2, 3]]
    params = BeamSearchParams(
        beam_width=width, max_tokens=5, length_penalty=penalty, ignore_eos=True
    )
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert by_hand(llm, prompt, width, 5, penalty) == told(output)
        for one in output.sequences:
            assert one.finish_reason == "length"
            assert len(one.logprobs) == 5
            assert one.text == llm.get_tokenizer().decode(one.tokens)


@pytest.mark.parametrize("with_end", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_sequences_that_end(llm: LLM, with_end: bool, penalty: float):
    """Every third token is an end: most sequences are short."""
    ends = tuple(range(0, llm.front.inputs.vocab_size, 3))
    llm.front.inputs.eos_token_ids = list(ends)
    params = BeamSearchParams(
        beam_width=4, max_tokens=5, length_penalty=penalty, include_stop_str_in_output=with_end
    )
    ended = 0
    for prompt in ([4, 5], [9], [7, 7]):
        (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
        assert by_hand(llm, prompt, 4, 5, penalty, ends, with_end) == told(output)
        for one in output.sequences:
            ended += one.finish_reason == "stop"
            assert (one.stop_reason in ends) == (one.finish_reason == "stop")
    assert ended


def test_a_wide_beam_finds_the_best_of_all(llm: LLM):
    best, vocab = None, llm.front.inputs.vocab_size
    first = model(llm).logprobs([4])
    for a in range(vocab):
        second = model(llm).logprobs([4, a])
        b = max(range(vocab), key=second.__getitem__)
        if best is None or first[a] + second[b] > best[1]:
            best = ([4, a, b], first[a] + second[b])
    params = BeamSearchParams(beam_width=64, max_tokens=2, ignore_eos=True)
    (output,) = llm.beam_search([[4]], params)
    assert output.sequences[0].tokens == best[0]
    assert output.sequences[0].cum_logprob == pytest.approx(best[1])


def test_one_beam_is_greedy(llm: LLM):
    params = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    (output,) = llm.beam_search("the", params)
    tokens = llm.get_tokenizer().encode("the")
    for _ in range(6):
        values = model(llm).logprobs(tokens)
        tokens.append(max(range(len(values)), key=values.__getitem__))
    assert output.sequences[0].tokens == tokens


def test_prompts_in_turns_are_the_same(llm: LLM):
    prompts = [[n] for n in range(1, 6)]
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    together = llm.beam_search(prompts, params)
    in_turns = llm.beam_search(prompts, params, concurrency_limit=2)
    assert [told(one) for one in together] == [told(one) for one in in_turns]


def test_beam_search_stops_at_the_context_limit(llm: LLM):
    length = llm.front.inputs.max_model_len
    params = BeamSearchParams(beam_width=2, max_tokens=10, ignore_eos=True)
    (output,) = llm.beam_search([[5] * (length - 3)], params)
    assert [len(one.tokens) for one in output.sequences] == [length] * 2
    assert {one.finish_reason for one in output.sequences} == {"length"}


def test_width_may_exceed_max_logprobs(llm: LLM):
    (output,) = llm.beam_search("the", BeamSearchParams(beam_width=30, max_tokens=2))
    assert len(output.sequences) == 30


def test_wrong_prompts_are_refused(llm: LLM):
    with pytest.raises(ValidationError, match="99999"):
        llm.beam_search([[99999]], BeamSearchParams(beam_width=2, max_tokens=2))
    assert llm.beam_search([], BeamSearchParams(beam_width=2, max_tokens=2)) == []


def test_progress(llm: LLM, capsys: pytest.CaptureFixture[str]):
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    llm.beam_search(["a", "b"], params, use_tqdm=True, concurrency_limit=1)
    shown = capsys.readouterr().err
    assert "Beam search" in shown
    assert "2/2" in shown
    llm.beam_search(["a", "b"], params)
    assert capsys.readouterr().err == ""


def test_a_search_is_one_request_in_the_metrics(llm: LLM):
    llm.beam_search([[4, 5], [9]], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    llm.generate("the", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    found = llm.get_metrics()
    by_name = {one.name: one for one in found if isinstance(one, Histogram)}
    assert by_name["vllm:e2e_request_latency_seconds"].count == 3
    assert by_name["vllm:request_generation_tokens"].sum == 2 * 3 * 4 + 2
    assert by_name["vllm:request_prompt_tokens"].sum == 2 + 1 + 1
    ends = {
        one.labels["finished_reason"]: one.value
        for one in found
        if isinstance(one, Counter) and one.name == "vllm:request_success"
    }
    assert {reason: count for reason, count in ends.items() if count} == {"length": 2 * 3 + 1}


def test_every_step_has_the_arrival_time_of_its_search(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    seen = []
    run = llm.run_accepted
    monkeypatch.setattr(llm, "run_accepted", lambda asked: seen.extend(asked) or run(asked))
    llm.beam_search([{"prompt_token_ids": [4, 5]}], BeamSearchParams(beam_width=3, max_tokens=4))
    assert len(seen) > 4
    assert len({child.arrived for accepted in seen for child in accepted.children}) == 1


def test_an_arrival_time_is_a_finite_number(llm: LLM):
    for wrong in (float("nan"), float("inf"), "now"):
        with pytest.raises(ValidationError) as raised:
            llm.front.inputs.accept("a", SamplingParams(), id="x", arrived=wrong)
        assert raised.value.parameter == "arrival_time"
