"""Engines of these measurements, in this process: prompts of token ids in, tokens and times out."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Model:
    """The checkpoint that the benchmark runs. `shorter`: engine settings with fewer layers, for measurements that do not depend on the
    number of layers."""

    path: str
    vocab: int
    shorter: dict[str, Any]

    def prompts(self, name: str, rows: int, length: int) -> list[list[int]]:
        """Random tokens, the same in every run for a name; no two share a prefix."""
        rng = random.Random(name)
        return [[rng.randrange(self.vocab) for _ in range(length)] for _ in range(rows)]


class KeptEngine:
    """An engine of one model in this process."""

    def __init__(self, model: Model, settings: dict[str, Any]):
        from quire.config.engine import EngineConfig
        from quire.engine.build import make_client

        config = EngineConfig.from_keywords(
            model=model.path, dtype="bfloat16", skip_tokenizer_init=True, disable_log_stats=True, **settings
        )  # fmt: skip
        self.client: Any = make_client(config)
        self.core = self.client.core
        self.numbers = itertools.count()

    @property
    def gate(self) -> Any:
        """The gate of kept blocks."""
        return next(gate for gate in self.core.scheduler.gates if gate.name == "kv_tiers")

    def count(self, name: str) -> float:
        return float(self.core.counts.get(name, 0.0))

    def begin(self, prompts: Sequence[list[int]], output: int) -> list[str]:
        """Send these prompts. Returns the ids of their requests."""
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, seed=0, detokenize=False)  # fmt: skip
        ids = [f"kept-{next(self.numbers)}" for _ in prompts]
        for id, prompt in zip(ids, prompts, strict=True):
            self.client.submit(EngineRequest(id, prompt, params))
        return ids

    def run(
        self, prompts: Sequence[list[int]], output: int
    ) -> tuple[list[list[int]], float, float]:
        """Returns the tokens of each, seconds to the first token of all, and seconds of all. Raises RuntimeError: a request failed."""
        first, began = 0.0, time.perf_counter()
        tokens: dict[str, list[int]] = {id: [] for id in self.begin(prompts, output)}
        left = len(tokens)
        while left:
            for answer in self.client.outputs():
                if answer.error is not None:
                    raise RuntimeError(answer.error)
                first = first or time.perf_counter() - began
                tokens[answer.id] += answer.tokens
                left -= answer.finish is not None
        return list(tokens.values()), first, time.perf_counter() - began

    def until(self, what: str, reached: Any) -> None:
        """Run steps until this is so. Raises TimeoutError."""
        end = time.monotonic() + PATIENCE_S
        while not reached():
            if time.monotonic() > end:
                raise TimeoutError(what)
            self.core.receive(block=False)
            self.core.step()
            time.sleep(0.001)

    def until_open(self) -> None:
        """The folder has been read."""
        disk = self.gate.store.stores[0]
        self.until("the folder is not open", lambda: disk.is_open and disk.num_refreshes)

    def until_saved(self) -> None:
        gate = self.gate
        self.until("blocks are not saved", lambda: not (gate.wants_plan() or gate.transfers.num_writing))  # fmt: skip


@contextmanager
def engine(model: Model, **settings: Any) -> Iterator[KeptEngine]:
    one = KeptEngine(model, settings)
    try:
        yield one
    finally:
        one.client.close()
