"""Every rule of SamplingParams against a plain one: each token, given the text before it, is as `reference_sampler.py` says."""

from __future__ import annotations

import numpy as np
import pytest
from devices import TinyModel, follow, generate, make_worker
from reference_sampler import log_softmax, plain

from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.logprobs import MODES

MODEL = TinyModel()
PROMPTS = [[5, 6, 7], [9], list(range(30, 50)), [100, 5, 100, 6, 6]]
COUNT = 24


def raw(text: list[int]) -> np.ndarray:
    """The model's logits after a text."""
    return MODEL.after(text[-1], len(text) - 1).numpy()


TEXT = follow(MODEL, PROMPTS[0], COUNT)  # the greedy one of the first prompt, to forbid parts of it
RULES = {
    "nothing": {},
    "top_k": {"top_k": 3},
    "top_k of 1": {"top_k": 1},
    "top_p": {"top_p": 0.4},
    "top_p of next to nothing": {"top_p": 1e-6},
    "min_p": {"min_p": 0.3},
    "all limits": {"top_k": 12, "top_p": 0.8, "min_p": 0.02},
    "repetition": {"repetition_penalty": 2.0},
    "repetition upwards": {"repetition_penalty": 0.4},
    "frequency": {"frequency_penalty": 1.7},
    "presence": {"presence_penalty": 2.0},
    "presence upwards": {"presence_penalty": -2.0},
    "all penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.9,
        "presence_penalty": 0.8,
    },
    "logit_bias": {"logit_bias": {3: 20.0, TEXT[0]: -100.0, 17: 19.0}},
    "allowed_token_ids": {"allowed_token_ids": [3, 17, 99, 17, 200]},
    "bad_words": {
        "bad_word_ids": [
            [TEXT[0]],
            TEXT[1:3],
            [1, *TEXT[1:3]],
            [*TEXT[2:5], TEXT[5]],
            *([token] for token in follow(MODEL, PROMPTS[1], 4)),
        ]
    },
    "min_tokens": {
        "min_tokens": 5,
        "eos_token_ids": [TEXT[0], TEXT[6]],
        "stop_token_ids": [TEXT[3]],
    },
    "everything": {
        "allowed_token_ids": list(range(0, 211, 2)),
        "bad_word_ids": [[2], [4, 6]],
        "min_tokens": 3,
        "eos_token_ids": [8],
        "logit_bias": {10: 3.0, 12: -3.0},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
    },
}
LIMITS = ("top_k", "top_p", "min_p")


def made(fields: dict, **more) -> SamplingParams:
    """SamplingParams does not accept the fields that the frontend fills in, by keyword."""
    return SamplingParams(**{"max_tokens": 50, **fields, **more})


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("rule", RULES)
def test_each_token_is_the_plain_one(rule, temperature):
    fields = RULES[rule]
    params = [made(fields, temperature=temperature, seed=11 + row) for row in range(len(PROMPTS))]
    worker = make_worker(MODEL)
    texts, _ = generate(worker, dict(enumerate(zip(PROMPTS, params, strict=True))), COUNT)
    differs = False
    for row, prompt in enumerate(PROMPTS):
        for at, token in enumerate(texts[row]):
            output = texts[row][:at]
            logits = raw(prompt + output)
            assert token == plain(logits, params[row], prompt, output).token, (row, at)
            free = SamplingParams(temperature=temperature, seed=params[row].seed)
            differs |= token != plain(logits, free, prompt, output).token
    acts = rule != "nothing" and not (temperature == 0 and set(fields) <= set(LIMITS))
    assert differs == acts  # else the test shows nothing


def test_rules_of_one_row_do_not_affect_others():
    prompts = {
        row: (PROMPTS[row % 4], made(fields, temperature=(row % 3) / 2, seed=row))
        for row, fields in enumerate(RULES.values())
    }
    together, _ = generate(make_worker(MODEL, max_rows=len(prompts)), prompts, COUNT)
    for row, alone in prompts.items():
        assert generate(make_worker(MODEL), {1: alone}, COUNT)[0][1] == together[row]


def test_min_tokens_of_rows_that_reach_them_one_by_one():
    ends = list(range(0, 211, 2))
    prompts = {
        row: (PROMPTS[row], made({"min_tokens": 4 * row, "eos_token_ids": ends}, seed=row))
        for row in range(4)
    }
    texts, _ = generate(make_worker(MODEL), prompts, COUNT)
    for row, (prompt, params) in prompts.items():
        for at, token in enumerate(texts[row]):
            output = texts[row][:at]
            assert token == plain(raw(prompt + output), params, prompt, output).token
        early = [token % 2 for token in texts[row][: 4 * row]]
        assert all(early)
        assert not all(token % 2 for token in texts[row][4 * row :])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs(mode, temperature):
    common = {
        "temperature": temperature, "repetition_penalty": 1.6, "top_k": 9, "logit_bias": {4: 5.0},
    }  # fmt: skip
    asked = [{"logprobs": 4}, {"logprobs": 0}, {"logprobs": -1}, {"logprob_token_ids": [7, 3, 11]}]
    params = [made({**common, **wish}, seed=row) for row, wish in enumerate(asked)]
    prompts = dict(enumerate(zip(PROMPTS, params, strict=True)))
    prompts[4] = ([8, 9], made(common, seed=1))
    texts, results = generate(make_worker(MODEL, logprobs_mode=mode), prompts, COUNT)
    for at, result in enumerate(results):
        assert set(result.logprobs) == {0, 1, 2, 3}
        for row, reported in result.logprobs.items():
            prompt, output = PROMPTS[row], texts[row][:at]
            logits = raw(prompt + output)
            drawn = plain(logits, params[row], prompt, output)
            scores = drawn.scores(logits, mode)
            assert reported.start == len(prompt) + at
            (ids,), (values,), (rank,) = reported.token_ids, reported.values, reported.ranks
            assert ids[0] == drawn.token
            assert values == pytest.approx(scores[ids].tolist(), rel=1e-5, abs=1e-5)
            assert rank == 1 + int((scores > scores[drawn.token]).sum())
            if row == 3:
                assert ids[1:] == [7, 3, 11]
            else:
                assert len(ids) == 1 + [4, 0, 211][row]
                best = np.sort(scores)[::-1][: len(ids) - 1]
                assert values[1:] == pytest.approx(best.tolist(), rel=1e-5, abs=1e-5)
                assert len(set(ids[1:])) == len(ids) - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [[20], [1, 7, 12], [19, 1]])
def test_prompt_logprobs(mode, chunks):
    """Of every prompt token but the first, whatever the chunks; no rule and no temperature touches them."""
    from devices import Driver, enter

    from quire.protocol.plan import WorkItem

    prompt = PROMPTS[2]
    params = made({"prompt_logprobs": 2, "temperature": 0.5, "repetition_penalty": 1.9}, seed=1)
    drive = Driver(make_worker(MODEL, logprobs_mode=mode))
    positions, entered = [], [enter(3, prompt, params)]
    for index, chunk in enumerate(chunks):
        last = index == len(chunks) - 1
        result = drive([WorkItem(3, chunk, samples=last)], entered)
        entered = []
        if (reported := result.prompt_logprobs.get(0)) is None:
            continue
        assert len(reported.ranks) == len(reported.values) == len(reported.token_ids)
        for offset, (ids, values, rank) in enumerate(
            zip(reported.token_ids, reported.values, reported.ranks, strict=True)
        ):
            at = reported.start + offset
            positions.append(at)
            logits = raw(prompt[:at]).astype(np.float64)
            scores = log_softmax(logits) if mode.endswith("logprobs") else logits
            assert ids[0] == prompt[at]
            assert ids[1:] == np.argsort(-scores, kind="stable")[:2].tolist()
            assert values == pytest.approx(scores[ids].tolist(), rel=1e-5, abs=1e-5)
            assert rank == 1 + int((scores > scores[prompt[at]]).sum())
    assert positions == list(range(1, len(prompt)))
    assert drive([WorkItem(3, 1)]).prompt_logprobs == {}


def test_a_row_without_an_allowed_token_fails_alone():
    cornered = made(
        {"allowed_token_ids": [5, 6], "bad_words": ["a", "b"], "bad_word_ids": [[5], [6]]},
        temperature=0.0,
    )
    free = made({}, temperature=0.0)
    for temperature in (0.0, 1.0):
        cornered.temperature = temperature
        _, (result,) = generate(
            make_worker(MODEL), {0: (PROMPTS[0], free), 1: (PROMPTS[0], cornered)}, 1
        )
        assert result.errors == {
            1: "no token is left to sample: allowed_token_ids and bad_words together exclude them all; allow more tokens"
        }
        assert result.kinds == {1: "invalid"}
        assert result.tokens[0] == TEXT[:1]
