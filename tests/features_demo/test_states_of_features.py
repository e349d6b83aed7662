"""What the core offers to features that keep recurrent states, or blocks of requests that end early; each joint with a small gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equality.engines import engine, greedy, make_checkpoint

from quire.engine import enabled_features
from quire.engine.feature import EngineParts, Feature
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.checkpoints import Checkpoint, CheckpointPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.plan import StepResult
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.gate import Gate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from tests.models.state_models import register, to_memory


class Limit:
    """A PrefixLimit that lets nobody continue, at first."""

    num_blocks = 0

    def usable(self, request: Any, num_found: int, num_blocks: int) -> int:
        return min(self.num_blocks, num_blocks)

    def reset(self) -> None:
        pass


class ListeningGate(Gate):
    """Offers the first 8 tokens of each request, and the state that continues from these tokens; notes late errors."""

    def __init__(self, limit: Limit):
        self.limit = limit
        self.loaded_tokens = 0
        self.late_errors: list[str] = []

    def can_load(self, request: Any, start: int) -> int:
        return 8 - start

    def load(self, request: Any, start: int, num_tokens: int) -> None:
        self.loaded_tokens += num_tokens
        self.limit.num_blocks = 2

    def on_late_error(self, request: Any) -> None:
        self.late_errors.append(request.id)


def scheduler_with(gate: Gate, limit: Limit) -> Scheduler:
    groups = [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))]
    kv = KVManager(BlockPool(40), groups, 4, limits=[limit])
    return Scheduler(kv, SchedulerLimits(max_rows=4, max_step_tokens=40, max_length=60), [gate])


def ask(scheduler: Scheduler, *ids: str) -> None:
    for id in ids:
        assert scheduler.add(EngineRequest(id, [7] * 15, SamplingParams(max_tokens=5))) is None


@pytest.mark.parametrize("meets", [False, True])
def test_a_gate_may_load_what_a_prefix_limit_needs(meets: bool) -> None:
    limit = Limit()
    gate = ListeningGate(limit)
    gate.meets_limits = meets
    scheduler = scheduler_with(gate, limit)
    ask(scheduler, "a")
    plan = scheduler.plan()
    assert plan is not None
    assert (gate.loaded_tokens, plan.entered[0].num_computed_tokens) == (8 * meets, 8 * meets)


def test_a_request_that_lost_what_it_loaded_is_computed() -> None:
    """The limit is asked again before the row."""
    limit = Limit()
    gate = ListeningGate(limit)
    gate.meets_limits, gate.loaded = True, lambda request: None  # type: ignore[method-assign]
    scheduler = scheduler_with(gate, limit)
    ask(scheduler, "a")
    assert scheduler.plan() is None
    gate.loaded = lambda request: True  # type: ignore[method-assign]
    gate.can_load = lambda request, start: 0  # type: ignore[method-assign]
    limit.num_blocks = 0
    plan = scheduler.plan()
    assert plan is not None
    assert plan.entered[0].num_computed_tokens == 0


@pytest.mark.parametrize("whole_step", [False, True])
def test_a_gate_hears_of_errors_of_requests_that_have_ended(whole_step: bool) -> None:
    gate = ListeningGate(Limit())
    scheduler = scheduler_with(gate, gate.limit)
    ask(scheduler, "a", "b")
    assert scheduler.plan() is not None
    scheduler.abort("a")
    if whole_step:
        assert [output.id for output in scheduler.fail_step(1, "wrong")] == ["b"]
    else:
        scheduler.commit(StepResult(1, [[], [5]], errors={0: "wrong"}))
    assert gate.late_errors == ["a"]


class Listener:
    """Notes what it hears of checkpoints."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_add(self, hash: bytes, found: Checkpoint) -> None:
        self.heard.append(("add", hash))

    def on_use(self, hash: bytes, found: Checkpoint) -> None:
        self.heard.append(("use", hash))

    def on_forget(self, hash: bytes, found: Checkpoint, is_evicted: bool) -> None:
        self.heard.append(("evicted" if is_evicted else "wrong", hash))


def test_a_state_from_outside_has_a_place_that_nobody_finds_until_it_is_written() -> None:
    pool, listener = CheckpointPool(2), Listener()
    pool.listeners.append(listener)
    pool.add(b"a", 1, False)
    pool.add(b"b", 2, True)
    slot = pool.reserve()
    assert slot is not None
    assert (len(pool), b"a" in pool, pool.can_reserve, pool.reserve()) == (1, False, False, None)
    pool.reset()
    assert pool.add(b"c", 3, False) is not None
    assert pool.add(b"d", 4, False) is not None  # in the place of c, not in the reserved one
    assert (b"c" in pool, pool.reserved) == (False, {slot})
    pool.publish(b"e", slot, 5)
    assert pool.use(b"e") == pool.find(b"e") == Checkpoint(slot, 5)
    pool.forget(b"e")
    names = [("add", b"a"), ("add", b"b"), ("evicted", b"a"), ("wrong", b"b"), ("add", b"c")]
    names += [("evicted", b"c"), ("add", b"d"), ("use", b"e"), ("wrong", b"e")]
    assert listener.heard == names


def test_a_reserved_place_comes_back() -> None:
    pool = CheckpointPool(1)
    slot = pool.reserve()
    assert slot == 0
    assert pool.add(b"a", 1, False) is None  # no place is left
    pool.give_back(slot)
    assert pool.add(b"a", 2, False) == Checkpoint(0, 2)
    twice = CheckpointPool(2)
    slot = twice.reserve()
    assert slot is not None
    made = twice.add(b"a", 3, False)
    twice.publish(b"a", slot, 4)  # another request has computed it
    assert twice.find(b"a") == made
    assert twice.free == [slot]


class KeepingFeature(Feature):
    """Notes the parts that features get for states."""

    name = "keeping"
    found: list[Any] = []  # noqa: RUF012

    def plug_into_engine(self, engine: EngineParts) -> None:
        self.found.append(engine.checkpoints)

    def plug_into_worker(self, parts: Any) -> None:
        self.found.append(parts.states)


def test_a_feature_gets_the_checkpoints_and_the_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    monkeypatch.setattr(enabled_features, "_of_plugins", lambda: [KeepingFeature])
    path = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    to_memory(tmp_path, "MemoryForCausalLM")
    KeepingFeature.found.clear()
    with engine(path, 2, block_size=16, mamba_block_size=16, skip_tokenizer_init=True) as one:
        states, checkpoints = KeepingFeature.found
        one.tokens([[9, 8, 7] * 12], greedy(2))
        (found,) = checkpoints.ends.values()
        assert states.saved_in == {found.slot: found.step}
        assert states.checkpoint(found.slot).any()
    with engine(path, 2, enable_prefix_caching=False, skip_tokenizer_init=True):
        assert KeepingFeature.found[-1] is None
