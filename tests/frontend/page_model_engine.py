"""A real core and scheduler over a model of a page: text in, text out, without torch.

The model's logits come from the last two tokens; a prompt may also be given the very tokens that follow it.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_tokenizers import byte_level, save_byte_level

from quire.config.engine import Resolved
from quire.config.from_keywords import engine_config
from quire.engine import rpc, sleep
from quire.engine.client import InlineClient
from quire.engine.core import EngineCore
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.output import EngineReady, Logprobs
from quire.protocol.plan import StepPlan, StepResult
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

VOCAB = byte_level().get_vocab_size()
MAX_LEN = 200


@functools.cache
def numbers(vocab: int) -> list[list[float]]:
    draw = random.Random(5)
    return [[draw.gauss(0, 2) for _ in range(vocab)] for _ in range(vocab)]


@dataclass
class Model:
    """Next-token logits, and what was scripted."""

    scripts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    vocab: int = VOCAB

    def logprobs(self, history: Sequence[int]) -> list[float]:
        table = numbers(self.vocab)
        first, last = history[-2] if len(history) > 1 else 0, history[-1]
        logits = [a + b / 2 for a, b in zip(table[last], table[-1 - first], strict=True)]
        top = max(logits)
        norm = top + math.log(sum(math.exp(logit - top) for logit in logits))
        return [logit - norm for logit in logits]

    def choose(self, history: list[int], num_prompt: int, params: SamplingParams) -> int:
        script = self.scripts.get(tuple(history[:num_prompt]))
        if script is not None:
            return script[len(history) - num_prompt]
        values = self.logprobs(history)
        if params.temperature == 0:
            return max(range(self.vocab), key=values.__getitem__)
        draw = random.Random(f"{params.seed} {len(history)}")
        return draw.choices(range(self.vocab), [math.exp(value) for value in values])[0]


@dataclass
class Row:
    id: str
    tokens: list[int]
    num_prompt: int
    num_computed_tokens: int
    params: SamplingParams


@dataclass
class Done:
    """A step's result, computed before it is asked for."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Executor:
    """Runs plans on a Model; `failing` holds request ids that fail alone."""

    recoverable: tuple[type[BaseException], ...] = ()

    def __init__(self, model: Model):
        self.model, self.rows = model, {}
        self.failing: set[str] = set()
        self.steps = 0
        self.pause = 0.0  # seconds a step takes at least
        self.closed = False
        self.broken: Exception | None = None

    def launch(self, plan: StepPlan) -> Done:
        if self.broken is not None:
            raise self.broken
        self.steps += 1
        time.sleep(self.pause)
        for row in plan.freed_rows:
            del self.rows[row]
        for new in plan.entered:
            self.rows[new.row] = Row(
                new.id, list(new.tokens), new.num_prompt, new.num_computed_tokens, new.params
            )
        result = StepResult(plan.step, [])
        for index, work in enumerate(plan.work):
            row = self.rows[work.row]
            if row.id in self.failing:
                result.errors[index] = "it was told to fail"
            start, row.num_computed_tokens = (
                row.num_computed_tokens,
                row.num_computed_tokens + work.num_tokens,
            )
            if row.params.prompt_logprobs is not None:
                self._prompt(result, index, row, start)
            result.tokens.append(self._sample(result, index, row) if work.samples else [])
        return Done(result)

    def _sample(self, result: StepResult, index: int, row: Row) -> list[int]:
        token = self.model.choose(row.tokens, row.num_prompt, row.params)
        if row.params.logprobs is not None or row.params.logprob_token_ids:
            values = self.model.logprobs(row.tokens)
            ids = row.params.logprob_token_ids or top(values, row.params.logprobs or 0)
            found = Logprobs(len(row.tokens), [], [], [])
            put(found, values, token, ids)
            result.logprobs[index] = found
        row.tokens.append(token)
        return [token]

    def _prompt(self, result: StepResult, index: int, row: Row, start: int) -> None:
        first, end = max(start, 0) + 1, min(row.num_computed_tokens + 1, row.num_prompt)
        if first >= end:
            return
        found = Logprobs(first, [], [], [])
        for position in range(first, end):
            values = self.model.logprobs(row.tokens[:position])
            put(found, values, row.tokens[position], top(values, row.params.prompt_logprobs))
        result.prompt_logprobs[index] = found

    def call(self, name: str, *args: Any) -> list[Any]:
        if name == "collective_rpc" and args[0] == "apply_model":
            return [args[1][0](self.model)]
        if name == "collective_rpc" and args[0] == "call_function":
            function, *rest = args[1]
            return [function(self, *rest, **args[2])]
        return [[name, *args]]

    def close(self) -> None:
        self.closed = True


def top(values: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda token: -values[token])[:count]


def put(found: Logprobs, values: Sequence[float], token: int, ids: Sequence[int]) -> None:
    found.token_ids.append([token, *ids])
    found.values.append([values[i] for i in (token, *ids)])
    found.ranks.append(1 + sum(value > values[token] for value in values))


def make(folder: Path, **keywords: Any) -> InlineClient:
    """A client over a fresh engine; its executor is `client.core.executor`, its model that one's."""
    if not (folder / "tokenizer.json").is_file():
        save_byte_level(folder)
    config = engine_config({"model": str(folder), "disable_log_stats": True, **keywords})
    length = int(config.model.max_model_len or MAX_LEN)
    groups = [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))]
    limits = SchedulerLimits(
        max_rows=4, max_step_tokens=32, max_length=length,
        by_priority=config.scheduler.scheduling_policy == "priority",
        max_waiting=config.scheduler.max_num_queued_reqs or 0,
    )  # fmt: skip
    core = EngineCore(Scheduler(KVManager(BlockPool(301), groups, 4), limits), Executor(Model()), 1)
    core.functions |= rpc.control_calls(core) | sleep.control_calls(core)
    resolved = Resolved(
        config=config, path=str(folder), hf_config={"vocab_size": VOCAB}, architecture="Toy",
        dtype="float32", device="cpu", max_model_len=length, auto_max_model_len=False, block_size=4,
        max_num_seqs=4, max_num_batched_tokens=32, chunked_prefill=True, prefix_caching=True, depth=1,
        executor="uni", tokenizer_path=config.model.tokenizer,
    )  # fmt: skip
    ready = EngineReady(length, 300, 4, VOCAB, "float32", "cpu", "Toy", "native", 1)
    return InlineClient(core, resolved, ready, shut=core.executor.close)
