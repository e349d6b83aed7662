"""An observer that the core does not name sees every step, on the fused native step and by parts, and changes none."""

from __future__ import annotations

import pytest
from equality.engines import engine, greedy, make_checkpoint, prompts
from equality.test_request_kinds import DEPTHS, PATHS, CountedSteps

from quire.protocol.plan import StepPlan, StepResult
from quire.protocol.sampling_params import SamplingParams

COUNT = 12


class Sums:
    """Builds the text of every row from plans and results alone."""

    def __init__(self) -> None:
        self.plans: dict[int, StepPlan] = {}
        self.rows: dict[int, str] = {}
        self.texts: dict[str, list[int]] = {}
        self.finished_steps: list[int] = []
        self.most_in_flight = 0

    def launched(self, plan: StepPlan) -> None:
        self.plans[plan.step] = plan
        self.most_in_flight = max(self.most_in_flight, len(self.plans) - len(self.finished_steps))

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        assert isinstance(result, StepResult)
        assert result.step == step
        self.finished_steps.append(step)
        plan = self.plans[step]
        for row in plan.freed_rows:
            del self.rows[row]
        for new in plan.entered:
            assert new.row not in self.rows
            self.rows[new.row] = new.id
        for item, tokens in zip(plan.work, result.tokens, strict=True):
            self.texts.setdefault(self.rows[item.row], []).extend(tokens)


class Failing:
    """An observer with a fault in its second call of one method."""

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, {"launched": 0, "finished": 0}

    def launched(self, plan: StepPlan) -> None:
        self._count("launched")

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        self._count("finished")

    def _count(self, name: str) -> None:
        self.calls[name] += 1
        if name == self.where and self.calls[name] == 2:
            raise RuntimeError("a fault of the observer")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), intermediate_size=128)


@pytest.fixture(scope="module")
def expected(path: str) -> list[list[int]]:
    """Without a further observer, at depth 1."""
    with engine(path, 1, dtype="bfloat16") as one:
        return one.tokens(prompts(6), greedy(COUNT))


@pytest.mark.parametrize("fused", PATHS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_step_is_observed(depth: int, fused: bool, path: str, expected: list) -> None:
    """More requests than rows and prompts in chunks, so that rows change hands while steps are in flight."""
    sums = Sums()
    with engine(path, depth, dtype="bfloat16", max_num_seqs=3, max_num_batched_tokens=40) as one:
        core = one.client.core
        worker = core.executor.worker
        if not fused:
            worker.fast_step = None
        count = CountedSteps(worker)
        core.observers.add(sums)
        assert one.tokens(prompts(6), greedy(COUNT)) == expected
        core.settle()
        assert sums.finished_steps == sorted(sums.plans) == list(range(1, core.scheduler.steps + 1))
        assert sums.most_in_flight == depth
        assert bool(count.fast) == fused
        assert sums in core.observers
    assert list(sums.texts.values()) == expected


@pytest.mark.parametrize("fused", PATHS)
@pytest.mark.parametrize("where", ["launched", "finished"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_one_that_fails_is_dropped(
    depth: int, where: str, fused: bool, path: str, expected: list
) -> None:
    failing, sums = Failing(where), Sums()
    with engine(path, depth, dtype="bfloat16") as one:
        core = one.client.core
        if not fused:
            core.executor.worker.fast_step = None
        core.observers.add(failing, sums)
        assert one.tokens(prompts(6), greedy(COUNT)) == expected
        assert failing not in core.observers
        assert sums in core.observers
    assert failing.calls[where] == 2


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_step_with_rows_of_both_paths(depth: int, path: str) -> None:
    """A request with log-probabilities runs by parts; the observer cannot tell, and the texts equal the outputs."""
    params = [
        greedy(COUNT),
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1),
    ]
    sums = Sums()
    with engine(path, depth, dtype="bfloat16") as one:
        one.client.core.observers.add(sums)
        texts = one.tokens(prompts(2), params)
        one.client.core.settle()
    assert list(sums.texts.values()) == texts
