"""Log-probabilities of drawn tokens and of prompts.

Knows logits and token ids. Does not know how tokens were drawn. "Scores" are log-probabilities or logits, as
`logprobs_mode` says; they are float32, and each row's scores are computed from that row alone.

Shape suffixes: N positions, V vocabulary, K tokens reported of each (the chosen one first).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.protocol.output import Logprobs

MAX_AT_ONCE = 1 << 20  # scores computed at a time
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(slots=True)
class ScoredTokens:
    """Tokens of N positions with their scores, on the device until `to_host`."""

    ids_NK: Tensor
    values_NK: Tensor
    ranks_N: Tensor

    def to_host(self) -> None:
        self.ids_NK = self.ids_NK.to("cpu", non_blocking=True)
        self.values_NK = self.values_NK.to("cpu", non_blocking=True)
        self.ranks_N = self.ranks_N.to("cpu", non_blocking=True)

    def report(self, start: int, first: int = 0, last: int | None = None) -> Logprobs:
        """Entries first : last, as positions from `start` on."""
        part = slice(first, last)
        return Logprobs(
            start,
            self.ids_NK[part].tolist(),
            self.values_NK[part].tolist(),
            self.ranks_N[part].tolist(),
        )


def score(
    logits_NV: Tensor, chosen_N: Tensor, top: int, also_NK: Tensor | None, normalise: bool
) -> ScoredTokens:
    """Score the chosen token, then the `top` best (-1: all), or the tokens `also_NK` instead of the best.

    A rank is one plus the number of tokens that score higher. A few positions are scored at a time, so that
    the scores fit the CPU's cache.
    """
    piece = max(1, MAX_AT_ONCE // logits_NV.shape[1])
    if len(logits_NV) > piece:
        starts = range(0, len(logits_NV), piece)
        return joined(
            [
                score(
                    logits_NV[index : index + piece],
                    chosen_N[index : index + piece],
                    top,
                    None if also_NK is None else also_NK[index : index + piece],
                    normalise,
                )
                for index in starts
            ]
        )
    scores_NV = logits_NV.float()
    if normalise:
        scores_NV = torch.log_softmax(scores_NV, dim=-1)
    chosen_N1 = chosen_N[:, None].long()
    value_N1 = scores_NV.gather(1, chosen_N1)
    ranks_N = (scores_NV > value_N1).sum(dim=1) + 1
    if also_NK is not None:
        more_NK, values_NK = also_NK, scores_NV.gather(1, also_NK)
    else:
        vocab = scores_NV.shape[1]
        values_NK, more_NK = scores_NV.topk(vocab if top < 0 else min(top, vocab), dim=-1)
    return ScoredTokens(
        torch.cat([chosen_N1, more_NK], dim=1), torch.cat([value_N1, values_NK], dim=1), ranks_N
    )


def best_allowed(logits_NV: Tensor, top: int) -> Tensor:
    """ids_NK of the `top` best tokens whose logits are not -inf; where there are fewer, the best one repeats."""
    values_NK, ids_NK = logits_NV.topk(min(top, logits_NV.shape[1]), dim=-1)
    return torch.where(values_NK == -torch.inf, ids_NK[:, :1], ids_NK)


def joined(parts: list[ScoredTokens]) -> ScoredTokens:
    """Join consecutive positions that were scored in pieces."""
    if len(parts) == 1:
        return parts[0]
    return ScoredTokens(
        torch.cat([part.ids_NK for part in parts]),
        torch.cat([part.values_NK for part in parts]),
        torch.cat([part.ranks_N for part in parts]),
    )
