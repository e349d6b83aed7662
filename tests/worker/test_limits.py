"""Survivors of top-k, top-p and min-p: by a threshold from few candidates, from a histogram, and one by one."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from quire.worker.sample import limits as module
from quire.worker.sample.draw import draw, keys, seed_words
from quire.worker.sample.limits import SCALE, Limits, draw_limited, full_threshold, threshold


def one_by_one(values: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The module's docstring, with sums that are exact. Tokens of equal logits live or die together."""
    top = values.max()
    floor = max(np.float32(top + np.log(min_p)) if min_p else -np.inf, -np.inf)
    if top_k:
        floor = max(floor, np.sort(values)[::-1][min(top_k, len(values)) - 1])
    weights = torch.exp(torch.from_numpy(values) - float(top)).mul_(SCALE).to(torch.int64).tolist()
    alive = values >= floor
    if top_p < 1:
        total = sum(w for w, a in zip(weights, alive, strict=True) if a)
        reached = 0
        for token in np.argsort(-values, kind="stable"):
            if not alive[token]:
                break
            reached += weights[token]
            if Fraction(reached) >= Fraction(top_p) * total:
                alive &= values >= values[token]
                break
    return alive


@pytest.mark.parametrize("seed", range(6))
def test_survivors(seed: int) -> None:
    dice = np.random.default_rng(seed)
    made = torch.Generator().manual_seed(seed)
    for trial in range(12):
        count, vocab = 4, int(dice.choice([5, 50, 3000]))
        scaled_SV = torch.randn(count, vocab, generator=made)
        scaled_SV *= float(dice.choice([0.0, 0.01, 0.3, 1, 3, 20]))
        if trial % 3 == 0:  # ties
            scaled_SV = (scaled_SV * 4).round() / 4
        if trial % 4 == 0:
            scaled_SV[:, ::3] = -torch.inf
        limits = Limits(
            dice.choice([0, 0, 1, 7, 100, 2500], count),
            dice.choice([1.0, 0.5, 0.9, 0.999, 1e-6], count),
            dice.choice([0, 0, 0.01, 0.5, 1.0], count),
        )
        survive = np.stack(
            [
                one_by_one(values, int(k), float(p), float(m))
                for values, k, p, m in zip(
                    scaled_SV.numpy(), limits.top_k, limits.top_p, limits.min_p, strict=True
                )
            ]
        )
        sorted_SV = scaled_SV.sort(dim=-1, descending=True).values
        for floor_S1 in (
            threshold(scaled_SV, sorted_SV, limits)[0],
            full_threshold(scaled_SV, limits),
        ):
            assert ((scaled_SV >= floor_S1).numpy() == survive).all()
        keys_2S = torch.from_numpy(keys(seed_words([seed] * count), np.arange(count)))
        kept_SV = scaled_SV.masked_fill(torch.from_numpy(~survive), -torch.inf)
        assert torch.equal(draw_limited(scaled_SV, limits, keys_2S), draw(kept_SV, keys_2S))


@pytest.mark.parametrize("vocab", [3, 3_000])
def test_what_reaches_top_p_to_the_letter_is_enough(vocab: int) -> None:
    """Weights 1, 1/2, 1/2 and p = 1/2: the first token alone."""
    scaled_SV = torch.full((1, vocab), -torch.inf)
    scaled_SV[0, [2, 0, 1]] = torch.tensor([0.0, -0.6931472, -0.6931472])
    assert scaled_SV[0, 0].exp() == 0.5
    limits = Limits(np.array([0]), np.array([0.5]), np.array([0.0]))
    sorted_SV = scaled_SV.sort(dim=-1, descending=True).values
    assert threshold(scaled_SV, sorted_SV, limits)[0] == 0
    assert full_threshold(scaled_SV, limits) == 0


def test_few_candidates_are_looked_at_when_top_k_says_so(monkeypatch) -> None:
    """No sort of the vocabulary, and no second look, where top-k names its survivors."""
    looked: list[int] = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda self, k, **given: (looked.append(k), topk(self, k, **given))[1]
    )
    for name in ("sort", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, None)
    monkeypatch.setattr(module, "full_threshold", None)
    scaled_SV = torch.randn(3, 5_000, generator=torch.Generator().manual_seed(0))
    keys_2S = torch.from_numpy(keys(seed_words([1, 2, 3]), np.arange(3)))
    limits = Limits(np.array([5, 20, 1]), np.array([0.9, 1.0, 0.5]), np.array([0.0, 0.1, 0.0]))
    draw_limited(scaled_SV, limits, keys_2S)
    assert looked == [20 + module.SPARE]


def test_rows_that_are_no_numbers_harm_nobody() -> None:
    scaled_SV = torch.randn(4, 3_000, generator=torch.Generator().manual_seed(0)) / 10
    keys_2S = torch.from_numpy(keys(seed_words([1, 2, 3, 4]), np.arange(4)))
    limits = Limits(np.zeros(4, np.int64), np.full(4, 0.9), np.zeros(4))
    expected = draw_limited(scaled_SV, limits, keys_2S)
    for row, value in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        scaled_SV[row, 17] = value
        scaled_SV[row, 40:] = value
    assert draw_limited(scaled_SV, limits, keys_2S)[0] == expected[0]
