"""The workloads with a tier, the equality of tokens and the store's own tests detect every broken rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from equality.engines import engine, greedy
from kv_tiers import tier_workload
from kv_tiers.kept import COMMON, hits, kept, save_all, spoil
from kv_tiers.test_kept_tokens import computed, flat
from kv_tiers.test_swap import FIRST as FIRST_BLOCK
from kv_tiers.test_swap import SECOND as SECOND_BLOCK
from kv_tiers.test_swap import answer_after_a_failed_step

from tests.broken_rule import broken

GATE, HOOK = "quire.features.kv_tiers.gate", "quire.features.kv_tiers.hook"
STATES, PREFIX = "quire.features.kv_tiers.states", "quire.features.kv_tiers.kept_prefix"
PENDING = "quire.features.kv_tiers.pending"
SWAP, POOL = "quire.features.kv_tiers.swap", "quire.kvstore.host_pool"
TRIALS = 400
FIRST = {"what left a window stays published": 334, "a copy of a failed step is swapped": 180}
"""Where the workloads begin that notice a mutation late."""
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "a row before the records are there": (GATE, "KVTierGate.loaded", "load.is_ready", "True"),
    "copies of a request that enters are forgotten": (GATE, "KVTierGate.enter", "self.to_load += ANY", "pass"),
    "saved before the step is committed": (GATE, "KVTierGate._is_committed", "step < ANY", "True"),
    "what is wrong is saved when it is forgotten": (GATE, "KVTierGate.on_forget", "is_taken and ANY", "True"),
    "a block is saved under its old name": (GATE, "KVTierGate._choose_saves", "self.kv.pool.hash_of.get(block) == key", "True"),
    "copies of a failed step are written": (
        GATE, "KVTierGate._finish_copies",
        "if sent.has_failed:\n    self.staging.give_back(slot)\nelse:\n    self.transfers.write(key, ANY, slot)",
        "self.transfers.write(key, self.record_bytes[key[0]], slot)",
    ),
    "slots are reused before all ranks have copied": (GATE, "KVTierGate._finish_copies", "step <= acknowledged", "True"),
    "a load that is not needed keeps its slots": (GATE, "KVTierGate.release", "self.transfers.cancel(ANY)", "pass"),
    "a window may have gaps": (PREFIX, "KeptPrefix._last_complete", "(gap := ANY) < 0", "(gap := -1) < 0"),
    "a group is not asked": (PREFIX, "KeptPrefix._last_complete", "self.groups", "[]"),
    "what left a window stays published": ("quire.kvcache.manager", "KVManager.published_by", "set(ANY)", "set()"),
    "a swapped block is found before its copy has run": (SWAP, "SwapSpace.take_leaving", "self.copying.add(key)", "self.pool.add(key, slot)"),
    "a swapped block is copied one plan late": (
        SWAP, "SwapSpace.take_leaving", "leaving, self.leaving = self.leaving, {}",
        "leaving, self.leaving, self.late = getattr(self, 'late', {}), {}, self.leaving",
    ),
    "a copy of a failed step is swapped": (GATE, "KVTierGate._finish_copies", "sent.has_failed or sent.is_outdated", "False"),
    "a slot with a pin is given up": (POOL, "HostPool.take", "self._idle.popitem(last=False)[1] if self._idle else None", "next(iter((self._idle or self._pinned).values()), None)"),
    "a request that ends keeps its pins": (GATE, "KVTierGate.on_waiting_ended", "self.swap.returned(request)", "pass"),
    "what leaves while the store is down is saved later": (
        GATE, "KVTierGate._choose_saves", "chosen, self.leaving = self.leaving, []",
        "chosen, self.leaving = (self.leaving, []) if self.store.is_open else ([], self.leaving)",
    ),
    "a row before its state is there": (PENDING, "TierLoad.is_ready", "not ANY", "True"),
    "a state is found before all of its parts are copied": (STATES, "KeptStates.copied", "not load.num_left", "load.slot in self.pool.reserved"),
    "a prompt goes on without a state": (PREFIX, "KeptPrefix._last_state", "usable < end", "(usable := end) < end"),
    "a state of a step in flight is saved": (STATES, "KeptStates.choose", "not self._is_committed(save.step)", "False"),
    "an evicted state of a step in flight is saved": (STATES, "KeptStates.on_forget", "self._is_committed(save.step)", "True"),
    "an evicted state is saved by the plan after": (
        STATES, "KeptStates.choose", "leaving, self.leaving = self.leaving, []",
        "leaving, self.leaving, self.late = getattr(self, 'late', []), [], self.leaving",
    ),
    "a wrong state is saved when it is forgotten": (STATES, "KeptStates.on_forget", "save is not None and is_evicted and ANY", "save is not None and self._is_committed(save.step)"),
    "a load that is not needed keeps its place": (STATES, "KeptStates.cancel", "self.pool.give_back(load.slot)", "pass"),
    "the hash ignores the salt": (
        "quire.kvcache.block_hash", "Hasher.root", 'f"{ANY}:{len(salt)}:{salt}{named}"', 'f"{self.identity}:{named}"',
    ),
}  # fmt: skip


UNCOMMITTED = (SWAP, "SwapSpace.on_taken", "key not in self.written", "True")
"""What a step in flight writes is swapped: `test_swap.py` has the order of steps that notices it."""

IN_FAULTY = {
    "copies of a failed step are written",
    "a copy of a failed step is swapped",
    "an evicted state of a step in flight is saved",
    "a wrong state is saved when it is forgotten",
}
"""What only workloads notice in which steps fail."""


def test_every_broken_rule_is_in_the_code() -> None:
    """(Renamed functions had left four mutations without effect, and only the slow tests noticed.)"""
    for mutation in (*MUTATIONS.values(), *OF_COPIES.values()):
        with broken(*mutation):
            pass


def noticed(name: str) -> bool:
    with broken(*MUTATIONS[name]):
        try:
            tier_workload.main(TRIALS, FIRST.get(name, 0), faulty=name in IN_FAULTY)
        except Exception:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_workloads_notice_a_broken_rule(name: str) -> None:
    assert noticed(name)


@pytest.mark.parametrize("depth", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_block_that_is_swapped_before_its_step_has_run_is_noticed(
    depth: int, checkpoint: Callable[..., str]
) -> None:
    """Workloads hardly notice it: another request must have the same prompt, and find all but this block in the cache."""
    path = checkpoint("qwen3")
    expected = flat(computed(path, [[*FIRST_BLOCK, *SECOND_BLOCK, *range(40, 50)]]))
    with broken(*UNCOMMITTED):
        found, num_bytes = answer_after_a_failed_step(path, depth)
    assert num_bytes
    assert found != expected


PROMPTS = [[9, 8, 7] * 15 + [20 + n] * 30 for n in range(4)]
OF_COPIES = {
    "a save after the step that overwrites": (HOOK, "KVTierHook.before", "_copy(part, place)", "self.late = [*getattr(self, 'late', []), (part, place)]; [_copy(a, b) for a, b in self.late[:-6]]"),
    "a load is not copied": (HOOK, "KVTierHook.before", "_copy(place, part)", "pass"),
    "parts of a block are exchanged": (HOOK, "KVTierHook._places", "start = end", "pass"),
    "a rank says it has copied before it has": (HOOK, "KVTierHook.before", "_copy(part, place)", "pass"),
}  # fmt: skip


ROUNDS = 8
"""It depends on the store's threads in which round a block is overwritten before its copy."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_COPIES)
def test_the_tokens_notice_a_broken_copy(
    name: str, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    path = checkpoint("qwen3")
    with engine(path, 2, **COMMON) as one:
        expected = one.tokens(PROMPTS, greedy(8))
    with broken(*OF_COPIES[name]), kept(path, tmp_path / "kv") as one:
        assert any(differs(one, expected) for _ in range(ROUNDS))
        assert hits(one) > 0


def differs(one: Any, expected: Any) -> bool:
    """Whether this round's tokens are wrong; then all blocks are saved, and the blocks of the cache filled with a pattern."""
    try:
        found: Any = one.tokens(PROMPTS, greedy(8))
    except RuntimeError as why:  # the pattern is not a number
        found = str(why)
    save_all(one)
    spoil(one)
    return bool(found != expected)
