"""SamplerOps: the functions with which a sampler draws and scores, as one object that assembly chooses.

Knows their signatures. Does not know the implementations: torch (here), or kernels (`triton_ops.py`, `cpu_ops.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.worker.sampling.builtin_processors import Penalties
from quire.worker.sampling.gumbel import draw
from quire.worker.sampling.logits_processors import Processor
from quire.worker.sampling.logprobs import ScoredTokens, score
from quire.worker.sampling.top_k_top_p import Cutoff, cutoff, draw_top_k_top_p


class SamplerOps(NamedTuple):
    """The defaults are the torch functions, which define the results."""

    draw: Callable[[Tensor, Tensor], Tensor] = draw
    draw_top_k_top_p: Callable[[Tensor, np.ndarray, Tensor], Tensor] = draw_top_k_top_p
    cutoff: Callable[[Tensor, np.ndarray], Cutoff] = cutoff
    score: Callable[[Tensor, Tensor, int, Tensor | None, bool], ScoredTokens] = score
    penalties: Callable[[], Processor] = Penalties
    sample: Callable[..., tuple[Tensor, Tensor]] | None = None
    """(the model's logits_SV, params_S, lengths_S) -> (tokens_S, the highest logit of each row): the same draw in one
    call, for rows without processors and log-probabilities; None: not available. Params: see `row_params.py`."""


TORCH_OPS = SamplerOps()
