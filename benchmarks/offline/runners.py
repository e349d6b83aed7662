"""Runners of the offline benchmark: Quire, and Transformers as the peer. Both answer the same prompts, greedily.

Knows how to start each and how to time one workload. Does not know any goals.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.shapes import Workload
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams


@dataclass(slots=True)
class Run:
    """One run of one workload."""

    seconds: float
    tokens: list[list[int]] = field(repr=False)  # generated, by request


class Contender(Protocol):
    name: str

    def run(self, workload: Workload, prompts: list[list[int]]) -> Run:
        """Generate exactly workload.output tokens for each prompt."""

    def close(self) -> None: ...


class Quire:
    """The engine in this process, token ids in and out. Prefix caching is off, so that every run does all work."""

    name = "quire"

    def __init__(
        self, path: Path, dtype: str, most_rows: int, most_tokens: int, options: dict[str, Any]
    ):
        from quire.config.engine import EngineConfig
        from quire.engine.build import make_client

        start = time.perf_counter()
        config = EngineConfig.from_keywords(
            model=str(path),
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=most_tokens,
            max_num_seqs=most_rows,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **options,
        )
        self.client = make_client(config)
        self.start_seconds = time.perf_counter() - start
        self.numbers = itertools.count()

    def run(
        self,
        workload: Workload,
        prompts: list[list[int]],
        adapters: Sequence[str | None] = (),
    ) -> Run:
        """Raises RuntimeError: the engine refused or failed a request. `adapters`: of each request; empty: none."""
        params = SamplingParams(
            temperature=0.0, max_tokens=workload.output, ignore_eos=True, seed=0, detokenize=False
        )
        requests = [
            EngineRequest(f"bench-{next(self.numbers)}", prompt, params) for prompt in prompts
        ]
        for request, adapter in zip(requests, adapters, strict=False):
            request.adapter = adapter
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        left = len(requests)
        start = time.perf_counter()
        for request in requests:
            self.client.submit(request)
        while left:
            for output in self.client.outputs():
                if output.error is not None:
                    raise RuntimeError(output.error)
                tokens[output.id] += output.tokens
                left -= output.finish is not None
        return Run(time.perf_counter() - start, list(tokens.values()))

    def close(self) -> None:
        self.client.close()


class Transformers:
    """Transformers' `generate` on one batch of prompts of equal length, so that it pads nothing."""

    name = "transformers"

    def __init__(self, path: Path, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        start = time.perf_counter()
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.model.generation_config.pad_token_id = 0
        self.start_seconds = time.perf_counter() - start

    def run(self, workload: Workload, prompts: list[list[int]]) -> Run:
        ids = self.torch.tensor(prompts)
        start = time.perf_counter()
        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=workload.output,
                min_new_tokens=workload.output,
            )
        seconds = time.perf_counter() - start
        return Run(seconds, out[:, workload.prompt :].tolist())

    def close(self) -> None:
        del self.model


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of generated tokens before the first difference in each request."""
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / max(sum(map(len, theirs)), 1)
