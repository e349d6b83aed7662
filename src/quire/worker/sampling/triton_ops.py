"""Sampling with Triton kernels: the same draws as the torch functions, without synchronizing with the device.

Knows which kernel implements which function. Does not know how the kernels work (`ops/triton/sampling.py`).

Shape suffixes: S rows, V vocabulary, N positions, K tokens reported of each, P rows with penalties.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.ops.triton import sampling
from quire.worker.sampling.builtin_processors import Penalties
from quire.worker.sampling.logits_processors import ProcessorRows
from quire.worker.sampling.logprobs import ScoredTokens
from quire.worker.sampling.sampler_ops import SamplerOps
from quire.worker.sampling.top_k_top_p import Cutoff


def _put(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device, non_blocking=True)


def draw(scaled_SV: Tensor, keys_2S: Tensor) -> Tensor:
    return sampling.draw(scaled_SV, keys_2S)


def cutoff(scaled_SV: Tensor, params_S: np.ndarray) -> Cutoff:
    numbers = (_put(params_S[name], scaled_SV) for name in ("top_k", "top_p", "log_min_p"))
    return Cutoff(*sampling.cutoff(scaled_SV, *numbers))


def draw_top_k_top_p(scaled_SV: Tensor, params_S: np.ndarray, keys_2S: Tensor) -> Tensor:
    cut = cutoff(scaled_SV, params_S)
    return sampling.draw(scaled_SV, keys_2S, (cut.logits_S, cut.ids_S))


def score(
    logits_NV: Tensor, chosen_N: Tensor, top: int, also_NK: Tensor | None, normalise: bool
) -> ScoredTokens:
    lse_N, ranks_N = sampling.rank(logits_NV, chosen_N.long(), normalise)
    chosen_N1 = chosen_N[:, None].long()
    if also_NK is None:
        vocab = logits_NV.shape[1]
        also_NK = logits_NV.topk(vocab if top < 0 else min(top, vocab), dim=-1).indices
    ids_NK = torch.cat([chosen_N1, also_NK], dim=1)
    return ScoredTokens(ids_NK, logits_NV.gather(1, ids_NK).float() - lse_N[:, None], ranks_N)


class TritonPenalties(Penalties):
    """Counts tokens and changes logits in two kernel launches."""

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        if any(row in self.embeddings for row in selected.rows.tolist()):
            return super().apply(logits_SV, selected)
        state = selected.state
        params = [state.params[row] for row in selected.rows.tolist()]
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        numbers = np.array([[getattr(p, name) for p in params] for name in names], np.float32)
        if logits_SV.stride(1) != 1:
            logits_SV = logits_SV.contiguous()
        at_P, rows_P, lengths_P, prompts_P = (
            _put(array.astype(np.int64), logits_SV)
            for array in (
                selected.indices,
                selected.rows,
                selected.lengths,
                state.num_prompt[selected.rows],
            )
        )
        numbers_3P, longest = _put(numbers, logits_SV), int(selected.lengths.max())
        sampling.penalize(
            logits_SV, at_P, rows_P, lengths_P, prompts_P, numbers_3P, state.token_ids_RL, longest
        )
        return logits_SV


TRITON_OPS = SamplerOps(draw, draw_top_k_top_p, cutoff, score, TritonPenalties)
