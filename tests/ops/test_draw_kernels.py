"""Draws and cuts by our kernels: the definition's tokens and survivors, in every build."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from worker.reference_limits import all_survivors, limits_of, tied_logits

from quire.ops import masked_argmax
from quire.ops.cpu import build
from quire.worker.sampling.cpu_ops import CpuSamplerOps
from quire.worker.sampling.gumbel import draw, draw_among, keys, seed_words
from quire.worker.sampling.row_params import ROW_PARAMS
from quire.worker.sampling.top_k_top_p import cutoff, draw_top_k_top_p
from tests.kernel_builds import BUILDS, kernels_of

SIZES = [1, 7, 16, 33, 700, 5000]


@pytest.fixture(params=BUILDS)
def native(request: pytest.FixtureRequest) -> CpuSamplerOps:
    return CpuSamplerOps(kernels_of(request.param))


def some(count: int, vocab: int, seed: int) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """Logits of any spread, with ties and tokens that are out; limits; keys."""
    dice, made = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    wide_SV = torch.randn(count, vocab + 5, generator=made)
    wide_SV *= float(dice.choice([0.0, 0.01, 0.3, 1, 3, 20]))
    if seed % 3 == 0:
        wide_SV = (wide_SV * 4).round() / 4
    if seed % 2 == 0:
        wide_SV[:, 1::3] = -torch.inf
    limits = limits_of(
        dice.choice([0, 0, 1, 7, 100, 2500], count),
        dice.choice([1.0, 0.5, 0.9, 0.999, 1e-6, 0.0], count),
        dice.choice([0, 0, 0.01, 0.5, 1.0], count),
    )
    seeds = dice.integers(0, 2**62, count).tolist()
    found = keys(seed_words(seeds), dice.integers(0, 99_999, count))
    return wide_SV[:, :vocab], limits, torch.from_numpy(found)


def test_the_table_of_rows_is_the_kernels_struct() -> None:
    """Names, types and order of the fields; the compiler lays a C struct out as `align=True` does."""
    header = Path(build.__file__).with_name("kernels") / "sampling.h"
    fields = re.findall(r"^  (\w+) (\w+);", header.read_text(), re.MULTILINE)
    types = {"float": "float32", "double": "float64", "uint32_t": "uint32", "int64_t": "int64"}
    expected = np.dtype([(name, types[kind]) for kind, name in fields], align=True)
    assert expected == ROW_PARAMS


@pytest.mark.parametrize("vocab", SIZES)
def test_kernels_draw_the_reference_tokens(native: CpuSamplerOps, vocab: int):
    for seed in range(12):
        scaled_SV, limits, keys_2S = some(9, vocab, seed)
        assert torch.equal(native.draw(scaled_SV, keys_2S), draw(scaled_SV, keys_2S))
        mine_SV = native.cutoff(scaled_SV, limits).masked_(scaled_SV.clone())
        assert torch.equal(mine_SV, cutoff(scaled_SV, limits).masked_(scaled_SV.clone()))
        mine_S = native.draw_top_k_top_p(scaled_SV, limits, keys_2S)
        assert torch.equal(mine_S, draw_top_k_top_p(scaled_SV, limits, keys_2S))


@pytest.mark.parametrize("vocab", SIZES)
def test_ties_go_to_the_lower_id(native: CpuSamplerOps, vocab: int):
    """Among equal logits, by parts and in one pass, as the definition says."""
    for seed in range(10):
        scaled_SV, limits = tied_logits(6, vocab, seed)
        kept_SV = scaled_SV.masked_fill(~all_survivors(scaled_SV, limits), -torch.inf)
        assert torch.equal(native.cutoff(scaled_SV, limits).masked_(scaled_SV.clone()), kept_SV)
        seeds_S, lengths_S = seed_words([seed] * 6), np.arange(6)
        keys_2S = torch.from_numpy(keys(seeds_S, lengths_S))
        assert torch.equal(
            native.draw_top_k_top_p(scaled_SV, limits, keys_2S), draw(kept_SV, keys_2S)
        )
        limits["seed"] = seeds_S
        tokens_S, _ = native.sample(scaled_SV.bfloat16(), limits, lengths_S)
        assert torch.equal(tokens_S, draw(kept_SV, keys_2S))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", SIZES)
def test_one_pass_draws_the_same_tokens(native: CpuSamplerOps, vocab: int, dtype: torch.dtype):
    for seed in range(12):
        dice = np.random.default_rng(seed)
        logits_SV, limits, _ = some(9, vocab, seed)
        logits_SV = logits_SV.to(dtype)
        seeds_S, lengths_S = seed_words(list(range(9))), dice.integers(0, 99_999, 9)
        temperature_S = dice.choice([0.0, 0.3, 1.0, 1.7], 9).astype(np.float32)
        limits["temperature"], limits["seed"] = temperature_S, seeds_S
        tokens_S, max_logit_S = native.sample(logits_SV, limits, lengths_S)
        assert torch.equal(max_logit_S, logits_SV.amax(dim=-1).float())
        greedy_S = torch.from_numpy(temperature_S == 0)
        assert torch.equal(
            tokens_S[greedy_S], masked_argmax.argmax.reference(logits_SV[greedy_S])[0]
        )
        warm = np.where(temperature_S == 0, np.float32(1), temperature_S)
        scaled_SV = logits_SV.float() / torch.from_numpy(warm)[:, None]
        keys_2S = torch.from_numpy(keys(seed_words(list(range(9))), lengths_S))
        want_S = native.draw_top_k_top_p(scaled_SV, limits, keys_2S)
        assert torch.equal(tokens_S[~greedy_S], want_S[~greedy_S])


def test_a_row_does_not_depend_on_its_neighbours(native: CpuSamplerOps):
    scaled_SV, limits, keys_2S = some(17, 3000, 1)
    together = native.draw_top_k_top_p(scaled_SV, limits, keys_2S)
    for row in range(17):
        at = np.array([row])
        alone = native.draw_top_k_top_p(
            scaled_SV[row : row + 1], limits[at], keys_2S[:, row : row + 1]
        )
        assert alone.tolist() == together[row : row + 1].tolist()


def test_a_likely_token_does_not_hide_a_lucky_one(native: CpuSamplerOps):
    """What is skipped as hopeless must be: each token wins as often as the definition says."""
    logits_SV = torch.tensor([[8.0, 0.0, 7.0, 1.0] + [0.0] * 300]).expand(6000, -1)
    keys_2S = torch.from_numpy(keys(seed_words([7] * 6000), np.arange(6000)))
    mine = native.draw(logits_SV, keys_2S)
    assert torch.equal(mine, draw(logits_SV, keys_2S))
    assert len(mine.unique()) > 100
    everything = torch.arange(304).expand(6000, -1)
    assert torch.equal(mine, draw_among(logits_SV, everything, keys_2S))


def test_invalid_rows_do_not_affect_others(native: CpuSamplerOps):
    scaled_SV, limits, keys_2S = some(5, 700, 2)
    before = native.draw_top_k_top_p(scaled_SV, limits, keys_2S)
    scaled_SV = scaled_SV.clone()
    scaled_SV[0], scaled_SV[2] = torch.nan, -torch.inf
    scaled_SV[3, 44] = torch.inf
    after = native.draw_top_k_top_p(scaled_SV, limits, keys_2S)
    assert after[[1, 4]].tolist() == before[[1, 4]].tolist()
    assert ((after >= 0) & (after < 700)).all()
    tokens_S, max_logit_S = native.sample(scaled_SV, limits, np.arange(5))
    assert max_logit_S.isfinite().tolist() == [False, True, False, False, True]
    assert ((tokens_S >= 0) & (tokens_S < 700)).all()
