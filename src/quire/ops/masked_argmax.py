"""Masked argmax of logits, and masks on logits: the definition, in plain torch.

Knows logits and masks. Does not know requests. Bit t % 32 of word t / 32 is set if token t is allowed.

Shape suffixes: S rows, V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.ops.dispatch import op

NEG_INF = -torch.inf


def num_words(vocab: int) -> int:
    return (vocab + 31) // 32


def bits(words_SW: Tensor, vocab: int) -> Tensor:
    """The mask as bool [S, V]."""
    if words_SW.device.type == "cpu":  # numpy takes a tenth of the time
        bytes_S = words_SW.contiguous().numpy().view(np.uint8)
        found = np.unpackbits(bytes_S, axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(found.view(bool))
    shifts = torch.arange(32, dtype=torch.int32, device=words_SW.device)
    return (words_SW[:, :, None] >> shifts & 1).flatten(1)[:, :vocab] != 0


@op
def argmax(logits_SV: Tensor, words_SW: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(best allowed token int64 [S], highest logit of all tokens, highest logit of allowed tokens; both float32 [S]).

    Among equal logits the lowest id wins. The highest of all is NaN or inf if any logit is. If no token is allowed, the
    highest of the allowed is -inf and the token is meaningless.
    """
    max_logit_S, tokens_S = logits_SV.max(dim=-1)
    if words_SW is None:
        return tokens_S, max_logit_S.float(), max_logit_S.float()
    allowed_SV = logits_SV.masked_fill(~bits(words_SW, logits_SV.shape[1]), NEG_INF)
    max_allowed_logit_S, tokens_S = allowed_SV.max(dim=-1)
    return tokens_S, max_logit_S.float(), max_allowed_logit_S.float()


@op
def mask_logits(logits_SV: Tensor, words_SW: Tensor) -> Tensor:
    """Set float32 logits of tokens that are not allowed to -inf, in place."""
    return logits_SV.masked_fill_(~bits(words_SW, logits_SV.shape[1]), NEG_INF)
