"""Drawing: which functions a sink draws and scores with, as one object that assembly chooses.

Knows their signatures. Does not know how either set works: plain torch (here), or kernels (`compiled.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from quire.worker.sampling.builtin_processors import Penalties
from quire.worker.sampling.gumbel import draw
from quire.worker.sampling.logits_processors import Processor
from quire.worker.sampling.logprobs import ScoredTokens, score
from quire.worker.sampling.top_k_top_p import Cutoff, SamplingLimits, cutoff, draw_top_k_top_p


class SamplerOps(NamedTuple):
    """See the plain functions for what each must give."""

    draw: Callable[[Tensor, Tensor], Tensor] = draw
    draw_top_k_top_p: Callable[[Tensor, SamplingLimits, Tensor], Tensor] = draw_top_k_top_p
    cutoff: Callable[[Tensor, SamplingLimits], Cutoff] = cutoff
    score: Callable[[Tensor, Tensor, int, Tensor | None, bool], ScoredTokens] = score
    penalties: Callable[[], Processor] = Penalties
    sample: Callable[..., tuple[Tensor, Tensor]] | None = None
    """(logits_SV as the model gives them, temperature_S (0: the best), limits, seeds_S, lengths_S) -> (tokens_S, the
    highest logit of each row): what the others would give for rows without rules and scores, if there is such a way."""


PLAIN = SamplerOps()
