"""A request's tokens and scores depend on neither its batch, its row, its chunks nor its preemptions."""

from __future__ import annotations

import random

import pytest
import torch
from devices import LENGTH, VOCAB, Driver, TinyModel, enter, generate, make_worker
from worker.reference_limits import limits_of

from quire.protocol.plan import WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.top_k_top_p import draw_top_k_top_p

COUNT = 7
WISHES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "min_p": 0.1, "top_p": 0.95},
    {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "presence_penalty": 2.0},
    {"temperature": 0.8, "min_tokens": 4, "eos_token_ids": list(range(0, VOCAB, 2))},
    {"temperature": 0.8, "bad_word_ids": [[7], [8, 9]], "logit_bias": {10: 2.0}},
]
REPORTS = [{}, {"logprobs": 3}, {"logprobs": 2, "prompt_logprobs": 1}]


def requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Several with the same seed among them."""
    dice = random.Random(seed)
    return [
        (
            [dice.randrange(VOCAB) for _ in range(dice.randint(1, 25))],
            SamplingParams(
                max_tokens=COUNT,
                seed=dice.randrange(3),
                **dice.choice(WISHES),
                **dice.choice(REPORTS),
            ),
        )
        for _ in range(count)
    ]


def flattened(results) -> tuple[dict, dict]:
    """Scores by position."""
    scores, prompts = {}, {}
    for result in results:
        for found, into in ((result.logprobs, scores), (result.prompt_logprobs, prompts)):
            for reported in found.values():
                for offset, line in enumerate(
                    zip(reported.token_ids, reported.values, reported.ranks, strict=True)
                ):
                    into[reported.start + offset] = line
    return scores, prompts


class Mates:
    """Runs requests together, as a careless scheduler might: rows, chunks and pauses by dice."""

    def __init__(self, asked, seed: int, mode: str):
        self.asked, self.dice = asked, random.Random(seed)
        self.drive = Driver(make_worker(TinyModel(), max_rows=6, logprobs_mode=mode))
        self.texts = [list(prompt) for prompt, _ in asked]
        self.scores = [({}, {}) for _ in asked]
        self.waiting, self.seated = list(range(len(asked))), {}  # row -> (request, computed)

    def run(self):
        while self.waiting or self.seated:
            self.step()
        texts = [
            text[len(prompt) :] for text, (prompt, _) in zip(self.texts, self.asked, strict=True)
        ]
        return texts, self.scores

    def step(self) -> None:
        entered, work = self.seat(), []
        for row in self.dice.sample(sorted(self.seated), self.dice.randint(1, len(self.seated))):
            request, computed = self.seated[row]
            left = len(self.texts[request]) - computed
            count = self.dice.randint(1, left)
            work.append(WorkItem(row, count, samples=count == left))
            self.seated[row] = request, computed + count
        result = self.drive(work, entered)
        assert not result.errors
        for index, item in enumerate(work):
            self.take(index, item.row, result)

    def seat(self):
        entered = []
        for row in set(range(6)) - set(self.seated) - set(self.drive.left):
            if (self.waiting and self.dice.random() < 0.7) or not self.seated:
                if not self.waiting:
                    break
                request = self.waiting.pop(self.dice.randrange(len(self.waiting)))
                prompt, params = self.asked[request]
                self.seated[row] = request, 0
                entered.append(enter(row, list(self.texts[request]), params, len(prompt)))
        return entered

    def take(self, index: int, row: int, result) -> None:
        request, _ = self.seated[row]
        text = self.texts[request]
        text += result.tokens[index]
        for found, into in zip(
            (result.logprobs, result.prompt_logprobs), self.scores[request], strict=True
        ):
            if index in found:
                into |= flattened([type(result)(0, [], {0: found[index]})])[0]
        done = len(text) - len(self.asked[request][0]) == COUNT
        if done or self.dice.random() < 0.06:  # the second: a preemption
            del self.seated[row]
            self.drive.left.append(row)
            if not done:
                self.waiting.append(request)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_batching_changes_nothing(mode):
    asked = requests(24, seed=3)
    alone = []
    for request in asked:
        texts, results = generate(
            make_worker(TinyModel(), max_rows=1, logprobs_mode=mode), {0: request}, COUNT
        )
        alone.append((texts[0], flattened(results)))
    assert len({tuple(text) for text, _ in alone}) > 20
    for seed in range(4):
        texts, scores = Mates(asked, seed, mode).run()
        assert texts == [text for text, _ in alone]
        assert scores == [each for _, each in alone]


def test_the_seed_does_matter():
    prompts = {row: ([1, 2, 3], SamplingParams(temperature=1.0, seed=row // 2)) for row in range(6)}
    texts, _ = generate(make_worker(), prompts, COUNT)
    assert texts[0] == texts[1] != texts[2] == texts[3] != texts[4] == texts[5]


def test_candidates_do_not_matter():
    """Rows with few survivors and rows with many, alone and together, in a vocabulary that is not all looked at."""
    made = torch.Generator().manual_seed(4)
    count, vocab = 12, 5_000
    spread = torch.tensor([0.0, 0.05, 0.5, 1.0, 3.0, 10.0]).repeat(2)[:, None]
    scaled_SV = torch.randn(count, vocab, generator=made) * spread
    scaled_SV[6:] = (scaled_SV[6:] * 8).round() / 8  # with ties
    keys_2S = torch.randint(-(2**31), 2**31, (2, count), generator=made).to(torch.int32)
    for top_k, top_p, min_p in [(0, 0.9, 0), (0, 0.3, 0.01), (50, 0.9, 0), (0, 1.0, 0.2), (2000, 0.99, 0)]:  # fmt: skip
        limits = limits_of(
            *(torch.full((count,), value).numpy() for value in (top_k, top_p, min_p))
        )
        together = draw_top_k_top_p(scaled_SV, limits, keys_2S)
        for row in range(count):
            here = torch.arange(row, row + 1)
            alone = draw_top_k_top_p(scaled_SV[here], limits[here.numpy()], keys_2S[:, here])
            assert alone == together[row]


def test_the_longest_text_has_a_place():
    params = SamplingParams(temperature=0.0, seed=0)
    drive = Driver(make_worker())
    result = drive([WorkItem(0, LENGTH)], [enter(0, [1] * LENGTH, params)])
    assert len(result.tokens[0]) == 1
