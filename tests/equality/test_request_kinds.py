"""Requests that generate nothing: the hidden state of the last prompt token, by a model output of this test.

Whatever the depth, the chunks, the prefix cache and the company, the tensor is the same, and so are the tokens of the
generating requests beside it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from torch import Tensor

from quire.errors import ConfigError
from quire.forward_context import ForwardBatch
from quire.layers.attention import Attention
from quire.ops.cpu.bindings import best
from quire.protocol.output import EngineOutput
from quire.protocol.plan import EnteredRow, StepPlan, StepResult
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import Abort, EngineRequest
from quire.protocol.tensor_data import TensorData
from quire.worker.worker import QueuedStep, Worker

PATHS = [
    pytest.param(True, marks=pytest.mark.skipif(best() is None, reason="no native kernels run here")),
    False,
]  # fmt: skip
DEPTHS = [1, 2, 3]


class LastHiddenState:
    """A model output: it computes rows with PoolingParams itself, and gives all others to the sampler."""

    def __init__(self, sampler: Any):
        self.sampler = sampler
        self.pooled: set[int] = set()

    @property
    def model(self) -> Any:
        return self.sampler.model

    @model.setter
    def model(self, model: Any) -> None:
        self.sampler.model = model

    def enter(self, new: EnteredRow) -> None:
        if isinstance(new.params, PoolingParams):
            self.pooled.add(new.row)
        else:
            self.sampler.enter(new)

    def leave(self, row: int) -> None:
        if row in self.pooled:
            self.pooled.discard(row)
        else:
            self.sampler.leave(row)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        mine = any(item.row in self.pooled for item in plan.work)
        return not mine and bool(self.sampler.accepts_fast_step(plan))

    def finish(self, plan: StepPlan, batch: ForwardBatch, hidden_TD: Tensor) -> QueuedStep:
        sampled = self.sampler.finish(plan, batch, hidden_TD)
        tensors: dict[int, TensorData] = {}
        rows, ends = self.sampler.rows, torch.tensor(batch.query_lens).cumsum(0)
        for index, (item, length) in enumerate(zip(plan.work, batch.lengths, strict=True)):
            if item.row in self.pooled and length == rows.num_prompt[item.row]:
                last_D = hidden_TD[ends[index] - 1].float().contiguous()
                tensors[index] = TensorData("float32", last_D.shape, last_D.numpy().tobytes())
        return With(sampled, tensors)


class With:
    def __init__(self, step: QueuedStep, tensors: dict[int, TensorData]):
        self.step, self.tensors = step, tensors

    def result(self) -> StepResult:
        result = self.step.result()
        result.tensors.update(self.tensors)
        return result


class CountedSteps:
    """How many steps ran on the fast path, and how many by parts."""

    def __init__(self, worker: Worker):
        self.fast = self.by_parts = 0
        fast, by_parts = worker._run_fast, worker._by_parts

        def counted_fast(plan: StepPlan) -> StepResult:
            self.fast += bool(plan.work)
            return fast(plan)

        def counted_by_parts(plan: StepPlan) -> QueuedStep:
            self.by_parts += 1
            return by_parts(plan)

        worker._run_fast, worker._by_parts = counted_fast, counted_by_parts  # type: ignore[method-assign]


def plugged(one: Engine, fused: bool) -> CountedSteps:
    worker = one.client.core.executor.worker
    worker.model_output = LastHiddenState(worker.model_output)
    one.client.core.check_each_step = True
    if not fused:
        worker.fast_step = None
    return CountedSteps(worker)


def tensor_of(outputs: list[EngineOutput]) -> list[float]:
    (output,) = outputs
    assert (output.finish, output.tokens) == ("stop", [])
    assert output.tensor is not None
    assert (output.tensor.dtype, output.tensor.shape) == ("float32", (64,))
    return torch.frombuffer(bytearray(output.tensor.data), dtype=torch.float32).tolist()


def mixed(one: Engine, given: list[list[int]]) -> tuple[list[list[float]], list[list[int]]]:
    """Tensors of all prompts, and the tokens of the same prompts beside them."""
    doubled = [prompt for prompt in given for _ in range(2)]
    found = one.run(doubled, [PoolingParams(), greedy(12)] * len(given))
    tokens = [[token for output in outputs for token in output.tokens] for outputs in found[1::2]]
    return [tensor_of(outputs) for outputs in found[0::2]], tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), intermediate_size=128)


SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16}


@pytest.fixture(scope="module")
def expected(path: str) -> tuple[list[list[float]], list[list[int]]]:
    """Each alone, in one chunk, at depth 1 and without a prefix cache."""
    with engine(path, 1, enable_prefix_caching=False, **SETTINGS) as one:
        tokens = [one.tokens([prompt], greedy(12))[0] for prompt in prompts(7, longest=90)]
        plugged(one, fused=False)
        found = [one.run([prompt], PoolingParams())[0] for prompt in prompts(7, longest=90)]
    return [tensor_of(outputs) for outputs in found], tokens


@pytest.mark.parametrize("fused", PATHS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_requests_for_tensors_and_for_tokens_share_a_batch(
    depth: int, fused: bool, path: str, expected: tuple[list[list[float]], list[list[int]]]
) -> None:
    """Chunks of prompts, requests of both kinds in a step, prompts that are wholly in the prefix cache."""
    given = prompts(7, longest=90)
    with engine(path, depth, max_num_batched_tokens=40, max_num_seqs=5, **SETTINGS) as one:
        count = plugged(one, fused)
        assert mixed(one, given) == expected
        assert count.by_parts > 5
        assert bool(count.fast) == fused
        before = one.stats()["prefix_hits"]
        again = [one.run([prompt], PoolingParams())[0] for prompt in given]
        assert [tensor_of(outputs) for outputs in again] == expected[0]
        assert [outputs[0].num_cached_tokens for outputs in again] == [
            (len(p) - 1) // 16 * 16 for p in given
        ]
        assert one.stats()["prefix_hits"] > before
        one.client.core.scheduler.check()


@pytest.mark.parametrize("fused", PATHS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_tensors_of_preempted_requests(
    depth: int, fused: bool, path: str, expected: tuple[list[list[float]], list[list[int]]]
) -> None:
    given = prompts(7, longest=90)
    with engine(path, depth, max_num_batched_tokens=40, **SETTINGS) as one:
        plugged(one, fused)
        client, outputs, calls = one.client, one.client.outputs, itertools.count(1)

        def preempting() -> list[EngineOutput]:
            if next(calls) % 3 == 0:
                client.call("reset_prefix_cache", True)
            return outputs()

        client.outputs = preempting  # type: ignore[method-assign]
        assert mixed(one, given) == expected
        assert one.stats()["preemptions"] > 5
        one.client.submit(EngineRequest("gone", given[0], PoolingParams()))
        one.client.core.inbox.put(Abort(["gone"]))
        assert [output.finish for output in one.client.outputs()] == ["abort"]
        one.client.core.scheduler.check()


@pytest.mark.parametrize("fused", PATHS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_token_ids_outside_the_vocabulary_fail_their_request_alone(
    depth: int, fused: bool, path: str, expected: tuple[list[list[float]], list[list[int]]]
) -> None:
    """Of both kinds of requests, first and in a later chunk; they come by without the frontend, which checks too."""
    given = prompts(7, longest=90)
    with engine(path, depth, max_num_batched_tokens=40, **SETTINGS) as one:
        plugged(one, fused)
        core, errors = one.client.core, {}
        for number, params in enumerate([PoolingParams(), greedy(5), PoolingParams(), greedy(5)]):
            tokens = [*given[0], 211] if number < 2 else [5] * 60 + [-1]
            core.inbox.put(EngineRequest(f"bad{number}", tokens, params))
        refused = core.scheduler.finished["error"]
        outputs = one.client.outputs

        def without_bad() -> list[EngineOutput]:
            found = outputs()
            errors.update({o.id: (o.error, o.error_kind) for o in found if o.id.startswith("bad")})
            return [output for output in found if output.id not in errors]

        one.client.outputs = without_bad  # type: ignore[method-assign]
        assert mixed(one, given) == expected
        fault = "prompt has a token id outside the vocabulary of 211"
        assert errors == {f"bad{number}": (fault, "invalid") for number in range(4)}
        assert core.scheduler.finished["error"] == refused + 4
        core.scheduler.check()


def test_an_engine_without_such_an_output_refuses_the_request(path: str) -> None:
    with engine(path, **SETTINGS) as one:
        with pytest.raises(RuntimeError, match="this engine generates tokens"):
            one.run([[5, 6, 7]], PoolingParams())
        with pytest.raises(RuntimeError, match="the prompt is empty"):
            one.run([[]], PoolingParams())
        with pytest.raises(RuntimeError, match="the prompt has 300 tokens: that exceeds max_model_len=256"):  # fmt: skip
            one.run([[5] * 300], PoolingParams())
        assert one.tokens([[5, 6, 7]], greedy(3))


def test_a_model_that_is_not_causal_computes_a_prompt_in_one_step(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prompts(4, longest=90)
    made = Attention.__init__

    def both_ways(self: Attention, *args: Any, **keywords: Any) -> None:
        made(self, *args, **keywords)
        self.spec = replace(self.spec, causal=False)

    with engine(path, dtype="float32") as one:
        plugged(one, fused=False)
        causal = [tensor_of(outputs) for outputs in one.run(given, PoolingParams())]
    monkeypatch.setattr(Attention, "__init__", both_ways)
    with pytest.raises(ConfigError, match="enable_chunked_prefill=False"), engine(path):
        pass
    whole = {"dtype": "float32", "enable_chunked_prefill": False, "max_num_batched_tokens": 256}
    lacking = pytest.raises(ConfigError, match="attention to later tokens")
    with lacking, engine(path, attention_backend="CPU_ATTN", **whole):
        pass
    with engine(path, **whole) as one:
        plugged(one, fused=False)
        found = [tensor_of(outputs) for outputs in one.run(given, PoolingParams())]
        again = [tensor_of(one.run([prompt], PoolingParams())[0]) for prompt in given]
        assert one.stats()["prefix_hits"] == 0
    assert found == again
    assert all(one != other for one, other in zip(found, causal, strict=True))
