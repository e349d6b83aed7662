"""Survivors of top-k, top-p and min-p: from few candidates, from whole rows, and one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from worker.reference_limits import all_survivors, limits_of, tied_logits

from quire.worker.sampling import top_k_top_p as module
from quire.worker.sampling.gumbel import draw, keys, seed_words
from quire.worker.sampling.top_k_top_p import cutoff, draw_top_k_top_p


def hold(scaled_SV: torch.Tensor, limits: np.ndarray, seed: int) -> None:
    """The cutoff and the draw equal the definition."""
    survive = all_survivors(scaled_SV, limits)
    kept_SV = scaled_SV.masked_fill(~survive, -torch.inf)
    assert torch.equal(cutoff(scaled_SV, limits).masked_(scaled_SV.clone()), kept_SV)
    count = len(scaled_SV)
    keys_2S = torch.from_numpy(keys(seed_words([seed] * count), np.arange(count)))
    assert torch.equal(draw_top_k_top_p(scaled_SV, limits, keys_2S), draw(kept_SV, keys_2S))


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
        limits = limits_of(
            dice.choice([0, 0, 1, 7, 100, 2500], count),
            dice.choice([1.0, 0.5, 0.9, 0.999, 1e-6], count),
            dice.choice([0, 0, 0.01, 0.5, 1.0], count),
        )
        hold(scaled_SV, limits, seed)


@pytest.mark.parametrize("vocab", [1, 6, 700, 5000])
def test_survivors_of_tied_logits(vocab: int) -> None:
    for seed in range(20):
        hold(*tied_logits(6, vocab, seed), seed)


def test_ties_go_to_the_lower_id() -> None:
    """Exactly k survive; top-p keeps the smallest prefix; min-p keeps all tokens of one logit."""
    scaled_SV = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0, 1.0, 3.0]]).repeat(7, 1)
    limits = limits_of(
        np.array([1, 3, 5, 0, 0, 0, 3]),
        np.array([1, 1, 1, 1e-6, 0.5, 1, 0.7]),
        np.array([0, 0, 0, 0, 0, 1.0, 0.5]),
    )
    kept_SV = cutoff(scaled_SV, limits).masked_(scaled_SV.clone())
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in kept_SV] == [
        [1], [1, 3, 4], [1, 2, 3, 4, 6], [1], [1, 3, 4], [1, 3, 4, 6], [1, 3, 4],
    ]  # fmt: skip


@pytest.mark.parametrize("vocab", [3, 3_000])
def test_reaching_top_p_exactly_is_enough(vocab: int) -> None:
    """Weights 1, 1/2, 1/2 and p = 1/2: the first token alone."""
    scaled_SV = torch.full((1, vocab), -torch.inf)
    scaled_SV[0, [2, 0, 1]] = torch.tensor([0.0, -0.6931472, -0.6931472])
    assert scaled_SV[0, 0].exp() == 0.5
    limits = limits_of(np.array([0]), np.array([0.5]), np.array([0.0]))
    cut = cutoff(scaled_SV, limits)
    assert (float(cut.logits_S), int(cut.ids_S)) == (0.0, 2)


def test_a_small_top_k_examines_few_candidates(monkeypatch) -> None:
    """No sort of the vocabulary, and no second look, where top-k names its survivors."""
    looked: list[int] = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda self, k, **given: (looked.append(k), topk(self, k, **given))[1]
    )
    for name in ("sort", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, None)
    monkeypatch.setattr(module, "cutoff", None)
    scaled_SV = torch.randn(3, 5_000, generator=torch.Generator().manual_seed(0))
    keys_2S = torch.from_numpy(keys(seed_words([1, 2, 3]), np.arange(3)))
    limits = limits_of(np.array([5, 20, 1]), np.array([0.9, 1.0, 0.5]), np.array([0.0, 0.1, 0.0]))
    draw_top_k_top_p(scaled_SV, limits, keys_2S)
    assert looked == [20 + module.SPARE]


def test_rows_of_nan_do_not_affect_others() -> None:
    scaled_SV = torch.randn(4, 3_000, generator=torch.Generator().manual_seed(0)) / 10
    keys_2S = torch.from_numpy(keys(seed_words([1, 2, 3, 4]), np.arange(4)))
    limits = limits_of(np.zeros(4, np.int64), np.full(4, 0.9), np.zeros(4))
    expected = draw_top_k_top_p(scaled_SV, limits, keys_2S)
    for row, value in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        scaled_SV[row, 17] = value
        scaled_SV[row, 40:] = value
    assert draw_top_k_top_p(scaled_SV, limits, keys_2S)[0] == expected[0]
