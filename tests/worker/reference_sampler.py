"""Sampling as SamplingParams describes it, for one row, in plain numpy: what the worker must be equal to.

Only the noise is taken from the engine: `test_draw.py` holds it against its definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.gumbel import gumbel, keys, seed_words

f32 = np.float32


@dataclass
class Plain:
    """One draw."""

    changed: np.ndarray  # float32 [V]: logits after all rules
    scaled: np.ndarray  # and after the temperature
    survives: np.ndarray  # bool [V]
    token: int

    def scores(self, raw: np.ndarray, mode: str) -> np.ndarray:
        """What logprobs report, in double precision."""
        values = raw if mode.startswith("raw") else np.where(self.survives, self.scaled, -np.inf)
        values = values.astype(np.float64)
        return log_softmax(values) if mode.endswith("logprobs") else values


def log_softmax(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float64) - values.max()
    return values - np.log(np.exp(values).sum())


def ruled(
    raw: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    """Logits after allowed tokens, bad words, min tokens, logit bias and penalties."""
    logits = raw.astype(f32).copy()
    if params.allowed_token_ids is not None:
        for token in range(len(logits)):
            if token not in params.allowed_token_ids:
                logits[token] = -np.inf
    for word in params.bad_word_ids:
        *before, last = word
        if not before or output[-len(before) :] == before:
            logits[last] = -np.inf
    if len(output) < params.min_tokens:
        for token in [*params.eos_token_ids, *params.stop_token_ids]:
            logits[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += f32(bias)
    for token in set(prompt + output):
        by = f32(params.repetition_penalty)
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    for token in set(output):
        logits[token] -= f32(params.frequency_penalty) * output.count(token)
        logits[token] -= f32(params.presence_penalty)
    return logits


def surviving(scaled: np.ndarray, params: SamplingParams) -> np.ndarray:
    """min-p, then top-k, then top-p: each of what the one before left."""
    chances = np.exp(scaled.astype(np.float64) - scaled.max())
    alive = chances >= params.min_p * chances.max()
    order = np.argsort(-scaled, kind="stable")
    if params.top_k:
        for token in [token for token in order if alive[token]][params.top_k :]:
            alive[token] = False
    total, reached = (chances * alive).sum(), 0.0
    for token in order:
        if alive[token] and params.top_p < 1:
            alive[token] = reached < params.top_p * total
            reached += chances[token]
    return alive & np.isfinite(scaled)


def plain(raw: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> Plain:
    """The draw of the token that follows prompt + output."""
    changed = ruled(raw, params, prompt, output)
    if params.temperature == 0:
        return Plain(changed, changed, np.isfinite(changed), int(changed.argmax()))
    scaled = changed / f32(params.temperature)
    survives = surviving(scaled, params)
    words = keys(seed_words([params.seed]), np.array([len(prompt) + len(output)]))
    ids = torch.arange(len(raw), dtype=torch.int32)
    noise = gumbel(torch.from_numpy(words), ids)[0].numpy()
    return Plain(
        changed, scaled, survives, int(np.where(survives, scaled + noise, -np.inf).argmax())
    )
