"""The best token of each row, and tokens taken out by a mask: in plain torch, the definition.

Knows logits and masks. Does not know requests. Bit t % 32 of word t / 32 is token t.

Shape suffixes: S rows, V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.ops.dispatch import op

NEVER = -torch.inf


def num_words(vocab: int) -> int:
    return (vocab + 31) // 32


def bits(words_SW: Tensor, vocab: int) -> Tensor:
    """[S, V] bool."""
    if words_SW.device.type == "cpu":  # numpy does it in a tenth of the time
        bytes_S = words_SW.contiguous().numpy().view(np.uint8)
        found = np.unpackbits(bytes_S, axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(found.view(bool))
    shifts = torch.arange(32, dtype=torch.int32, device=words_SW.device)
    return (words_SW[:, :, None] >> shifts & 1).flatten(1)[:, :vocab] != 0


@op
def best(logits_SV: Tensor, words_SW: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(the best token that is allowed [S] int64, the highest logit of all, the highest of the allowed; both float32).

    Among equal logits the lowest id is best. The highest of all is NaN or inf if any is; the highest of the allowed is
    -inf if none is, and then the token means nothing.
    """
    whole_S, tokens_S = logits_SV.max(dim=-1)
    if words_SW is None:
        return tokens_S, whole_S.float(), whole_S.float()
    kept_SV = logits_SV.masked_fill(~bits(words_SW, logits_SV.shape[1]), NEVER)
    kept_S, tokens_S = kept_SV.max(dim=-1)
    return tokens_S, whole_S.float(), kept_S.float()


@op
def bar(logits_SV: Tensor, words_SW: Tensor) -> Tensor:
    """Float32 logits, -inf where a token is not allowed. Writes over its input."""
    return logits_SV.masked_fill_(~bits(words_SW, logits_SV.shape[1]), NEVER)
