"""Hooks that the core does not name: they get the batch, add tensors to it, and may refuse the fast path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts

from quire.forward_context import ForwardBatch, current_batch
from quire.ops.cpu.bindings import best
from quire.protocol.plan import EnteredRow, StepPlan
from quire.protocol.sampling_params import SamplingParams
from quire.worker.hooks import Hook
from quire.worker.model_input import TokenModelInput

FUSED = [
    pytest.param(True, marks=pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")),
    False,
]  # fmt: skip
DEPTHS = [1, 2, 3]


class SilentHook(Hook):
    """It says nothing about the fast path."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch | None] = []
        self.works = 0

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        self.works += bool(plan.work)
        self.batches += [batch] if plan.work else []


class NegatingHook(Hook):
    """A feature by row, as adapters are: it negates the hidden states of requests with an odd seed."""

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.fast = self.by_parts = 0

    def enter(self, new: EnteredRow) -> None:
        if (new.params.seed or 0) % 2:
            self.rows.add(new.row)

    def leave(self, row: int) -> None:
        self.rows.discard(row)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return self.rows.isdisjoint(item.row for item in plan.work)

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        self.fast += bool(plan.work) and batch is None
        if batch is None:
            return
        self.by_parts += 1
        signs = [-1 if item.row in self.rows else 1 for item in plan.work]
        batch.extras["signs_B"] = torch.tensor(signs)


class NegatingInput(TokenModelInput):
    """The part of the feature that the model runs: it reads the batch as a layer does."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        seen = current_batch()
        signs_T = seen.extras["signs_B"].repeat_interleave(seen.query_start_B1.diff())
        return super().forward(batch) * signs_T[:, None].to(torch.bfloat16)


def worker_of(one: Engine) -> Any:
    return one.client.core.executor.worker  # type: ignore[attr-defined]


def set_path(one: Engine, fused: bool) -> None:
    if not fused:
        worker_of(one).fast_step = None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), intermediate_size=128)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_hook_without_fast_path_support_sees_every_batch(
    depth: int, fused: bool, path: str
) -> None:
    with engine(path, depth, dtype="bfloat16") as one:
        set_path(one, fused)
        wanted = one.tokens(prompts(5), greedy(12))
        hook = SilentHook()
        worker_of(one).hooks.append(hook)
        one.client.call("reset_prefix_cache")
        assert one.tokens(prompts(5), greedy(12)) == wanted
    assert hook.works > 10
    assert len([batch for batch in hook.batches if batch is not None]) == hook.works


@pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")
@pytest.mark.parametrize("part", ["model_input", "model_output"])
def test_a_part_without_fast_path_support_is_not_skipped(part: str, path: str) -> None:
    """One that only has what its interface asks for."""

    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.inner, self.calls = inner, 0
            self.set_fused = self.enter = self.leave = lambda *_: None
            for name in ("set_fused", "enter", "leave", "model"):
                setattr(self, name, getattr(inner, name, None))

        def forward(self, *args: Any) -> Any:
            self.calls += 1
            return self.inner.forward(*args)

        def finish(self, *args: Any) -> Any:
            self.calls += 1
            return self.inner.finish(*args)

    with engine(path, dtype="bfloat16") as one:
        worker = worker_of(one)
        wanted = one.tokens(prompts(3), greedy(6))
        wrapper = Wrapper(getattr(worker, part))
        setattr(worker, part, wrapper)
        one.client.call("reset_prefix_cache")
        assert one.tokens(prompts(3), greedy(6)) == wanted
    assert wrapper.calls > 5


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_model_that_records_hidden_states_keeps_the_fast_path(depth: int, path: str) -> None:
    """And by parts it records the same; it may begin and end while the worker has the model."""
    with engine(path, depth, dtype="bfloat16") as one:
        worker = worker_of(one)
        batches, build = [], worker.batcher.build
        worker.batcher.build = lambda plan: batches.append(build(plan)) or batches[-1]
        wanted = one.tokens(prompts(3), greedy(6))
        assert not batches or best() is None
        batches.clear()
        worker.model.record_hidden_states([1])
        one.client.call("reset_prefix_cache")
        assert one.tokens(prompts(3), greedy(6)) == wanted
        assert not batches or best() is None
        last = {number: states.clone() for number, states in worker.model.fast_states.items()}
        worker.unfuse("test")
        one.client.call("reset_prefix_cache")
        assert one.tokens(prompts(3), greedy(6)) == wanted
        assert all(len(batch.hidden_states[1]) == batch.num_tokens for batch in batches)
        found = batches[-1].hidden_states[1]
        assert best() is None or torch.equal(last[1][: len(found)], found)
        worker.fuse("test")
        worker.model.record_hidden_states([])
        batches.clear()
        one.client.call("reset_prefix_cache")
        assert one.tokens(prompts(3), greedy(6)) == wanted
        assert not batches or best() is None


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_with_a_feature_leave_the_fast_path(depth: int, fused: bool, path: str) -> None:
    texts = prompts(8)
    lengths = [6 + 5 * number for number in range(8)]  # those with odd seeds end first

    def params(negated: bool) -> list[SamplingParams]:
        seeds = [1 if negated and number < 4 else 0 for number in range(8)]
        return [replace_seed(greedy(n), seed) for n, seed in zip(lengths, seeds, strict=True)]

    with engine(path, depth, dtype="bfloat16") as one:
        set_path(one, fused)
        plain = one.tokens(texts, params(False))
        worker, hook = worker_of(one), NegatingHook()
        worker.hooks.append(hook)
        worker.model_input = NegatingInput(worker.model)
        one.client.call("reset_prefix_cache")
        mixed = one.tokens(texts, params(True))
    assert mixed[4:] == plain[4:]
    assert all(a != b for a, b in zip(mixed[:4], plain[:4], strict=True))
    assert hook.by_parts > 5
    assert (hook.fast > 5) == fused
    with engine(path, dtype="bfloat16") as one:
        worker, hook = worker_of(one), NegatingHook()
        worker.hooks.append(hook)
        worker.model_input, worker.fast_step = NegatingInput(worker.model), None
        assert one.tokens(texts, params(True)) == mixed


def replace_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=params.max_tokens, ignore_eos=True, seed=seed)
