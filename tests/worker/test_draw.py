"""The draw: as its definition says, distributed as it should be, favouring no token, seed or position.

Mutations that these must catch: key word b made of a + GOLDEN (then token 1 always wins); the position left out
of the key; the high half of the seed left out; v not folded to 31 bits.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quire.worker.sampling.gumbel import draw, draw_among, gumbel, keys, seed_words

M = 0xFFFFFFFF


def plain_mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & M
    x = (x ^ (x >> 15)) * 0x846CA68B & M
    return x ^ (x >> 16)


def plain_gumbel(seed: int, position: int, token: int) -> float:
    """The module's docstring, in integers of any size and doubles."""
    seed &= (1 << 64) - 1
    a = plain_mix(plain_mix(plain_mix(seed & M) ^ (seed >> 32)) ^ position)
    b = plain_mix((plain_mix(a) + 0x85EBCA6B) & M)
    word = plain_mix(plain_mix((token * 0x9E3779B9 + a) & M) ^ b)
    v = np.float32(np.float32(word & 0x7FFFFFFF) + np.float32(0.5)) * np.float32(2.0**-31)
    return -math.log(-math.log1p(-min(float(v), 1 - 2.0**-24)))


def made_keys(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return torch.from_numpy(keys(seed_words(seeds), np.array(positions)))


def test_noise_equals_its_definition() -> None:
    cases = [(0, 0), (1, 17), (-1, 5), (2**63 + 12345, 100_000), (42, 1)]
    ids = torch.tensor([0, 1, 2, 77, 50_000, 151_935], dtype=torch.int32)
    noise = gumbel(made_keys([s for s, _ in cases], [p for _, p in cases]), ids)
    for row, (seed, position) in enumerate(cases):
        want = [plain_gumbel(seed, position, int(token)) for token in ids]
        assert noise[row].tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)


def surprise(tokens: list[int], chances: list[float]) -> float:
    """Chi squared per degree of freedom: near 1 when the tokens were drawn by these chances."""
    counts = np.bincount(tokens, minlength=len(chances))
    expected = np.array(chances) * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum() / (len(chances) - 1))


VARIED = {
    "positions": ([7] * 20_000, range(20_000)),
    "seeds": (range(20_000), [3] * 20_000),
    "high halves of seeds": ([n << 32 for n in range(20_000)], [3] * 20_000),
}


@pytest.mark.parametrize("what", VARIED)
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_draws_follow_the_softmax(what: str, spread: float) -> None:
    seeds, positions = (list(values) for values in VARIED[what])
    logits = spread * torch.randn(24, generator=torch.Generator().manual_seed(1))
    tokens = draw(logits.expand(20_000, -1), made_keys(seeds, positions))
    assert (
        surprise(tokens.tolist(), logits.softmax(0).tolist()) < 2.3
    )  # one in ten thousand, by luck


def test_no_token_is_favoured() -> None:
    """Mean of the noise of each of 4,000 tokens over 400 positions: 0.577, give or take 5 standard errors."""
    ids = torch.arange(4_000, dtype=torch.int32)
    noise = gumbel(made_keys([5] * 400, list(range(400))), ids)
    means = noise.mean(0)
    assert float((means - 0.5772).abs().max()) < 5 * math.pi / math.sqrt(6 * 400)


def test_neighbouring_keys_have_independent_noise() -> None:
    """Draws at one position do not tell the draws at the next, nor one seed's draws the next seed's."""
    count = 20_000
    keys_2S = made_keys([1] * count, list(range(count)))
    tokens = draw(torch.zeros(count, 4), keys_2S)
    pairs = (tokens[:-1] * 4 + tokens[1:]).tolist()
    assert surprise(pairs, [1 / 16] * 16) < 2.9


def test_the_order_of_candidates_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(50, 300, generator=generator)
    keys_2S = made_keys([9] * 50, list(range(50)))
    order = torch.stack([torch.randperm(300, generator=generator) for _ in range(50)])
    assert torch.equal(draw(logits, keys_2S), draw_among(logits.gather(1, order), order, keys_2S))
