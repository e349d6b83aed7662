"""The draw: a token from logits, as a pure function of (seed, position, token id).

Knows logits, seeds and positions. Does not know requests. There is no random generator and so no state: a
request draws the same token at any index of any batch, whatever else is drawn.

    token = argmax over survivors of  logit / temperature + gumbel(seed, position, token id)

This is a draw from softmax(logit / temperature) over the survivors. `position` is the position of the token being
drawn, counted from the start of the prompt. All arithmetic is on 32-bit words that wrap:

    mix(x):   x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16     (C. Wellons)
    key:      a = mix(mix(mix(seed_low) ^ seed_high) ^ position);   b = mix(mix(a) + 0x85EBCA6B)
    word:     mix(mix(token * 0x9E3779B9 + a) ^ b)
    gumbel:   -log(-log1p(-v)),  v = ((word & 0x7FFFFFFF) + 0.5) / 2^31 rounded to float32, at most 1 - 2^-24

`key` is computed once per row (numpy), `word` once per row and token (torch int32, whose product wraps; the
kernels use uint32). v is finest near 0, where the large values of gumbel come from.

Shape suffixes: S rows, V vocabulary, K candidates of a row.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from quire.ops import masked_argmax

GOLDEN, OTHER = 0x9E3779B9, 0x85EBCA6B
WORD = 0xFFFFFFFF
MULTIPLIER_1, MULTIPLIER_2 = 0x7FEB352D, 0x846CA68B
MAX_AT_ONCE = 1 << 18  # words computed at a time: they fit a core's own cache


def mix(x: np.ndarray) -> np.ndarray:
    """The mixing function on uint32 words."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(MULTIPLIER_1)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(MULTIPLIER_2)
    return x ^ (x >> np.uint32(16))


def seed_word(seed: int) -> int:
    """The part of a key that does not depend on the position: mix(mix(low) ^ high), of the seed modulo 2^64.

    Uses Python integers: for a single word numpy takes ten times as long.
    """

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * MULTIPLIER_1 & WORD
        x = (x ^ x >> 15) * MULTIPLIER_2 & WORD
        return x ^ x >> 16

    return mixed(mixed(seed & WORD) ^ seed >> 32 & WORD)


def seed_words(seeds: list[int]) -> np.ndarray:
    """`seed_word` of each seed, uint32."""
    return np.array([seed_word(seed) for seed in seeds], np.uint32)


def keys(seed_words_S: np.ndarray, positions_S: np.ndarray) -> np.ndarray:
    """[2, S] int32: the words a and b of each row."""
    a = mix(seed_words_S ^ positions_S.astype(np.uint32))
    # not a simple function of a, or one token's word would always be 0
    b = mix(mix(a) + np.uint32(OTHER))
    return np.stack([a, b]).view(np.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _mix_(x: Tensor, spare: Tensor) -> None:
    """The mixing function on int32, in place; `>>` copies the sign bit there, so the copies are masked off."""
    for shift, multiplier in ((16, MULTIPLIER_1), (15, MULTIPLIER_2), (16, None)):
        torch.bitwise_right_shift(x, shift, out=spare)
        spare &= (1 << (32 - shift)) - 1
        x ^= spare
        if multiplier is not None:
            x *= _signed(multiplier)


def gumbel(keys_2S: Tensor, ids: Tensor) -> Tensor:
    """Float32 noise of tokens `ids` ([V], or [S, K] by row) for rows with these keys: [S, V] or [S, K]."""
    x = ids * _signed(GOLDEN) + keys_2S[0, :, None]
    spare = torch.empty_like(x)
    _mix_(x, spare)
    x ^= keys_2S[1, :, None]
    _mix_(x, spare)
    x &= 0x7FFFFFFF
    minus_v = x.to(torch.float32).add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    return minus_v.log1p_().neg_().log_().neg_()


@lru_cache(maxsize=4)
def _all_ids(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, dtype=torch.int32, device=device)


def draw(scaled_SV: Tensor, keys_2S: Tensor) -> Tensor:
    """Draw token ids, int64 [S], from float32 logits that are already divided by the temperature."""
    count, vocab = scaled_SV.shape
    ids = _all_ids(vocab, scaled_SV.device)
    rows = max(1, MAX_AT_ONCE // vocab)
    parts = []
    for start in range(0, count, rows):
        noise = gumbel(keys_2S[:, start : start + rows], ids)
        parts.append(masked_argmax.argmax(noise.add_(scaled_SV[start : start + rows]))[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def draw_among(values_SK: Tensor, ids_SK: Tensor, keys_2S: Tensor) -> Tensor:
    """As `draw`, from candidates in any order; value -inf excludes a candidate. Ties go to the lower id."""
    score = gumbel(keys_2S, ids_SK.to(torch.int32)).add_(values_SK)
    best = score.amax(dim=-1, keepdim=True)
    return ids_SK.masked_fill(score < best, torch.iinfo(ids_SK.dtype).max).amin(dim=-1)
