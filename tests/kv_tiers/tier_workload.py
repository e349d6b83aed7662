"""The random workloads of tests/engine with a tier: a store that is slow, empty in places, full, late, down and short of slots, swap space that
is too small, or both. A stateful device keeps its checkpoints there, in parts.

Workloads without faults of the device share one store for each block size, as restarted engines do: each block that one finds was
computed by another. `python tests/kv_tiers/tier_workload.py 3000` runs many by hand.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

ENGINE = Path(__file__).parents[1] / "engine"
sys.path[:0] = [str(ENGINE), str(ENGINE.parents[1])] * (str(ENGINE) not in sys.path)

import workload  # noqa: E402
from toy_device import POISON, ToyStates  # noqa: E402

from quire.config.observe import ObserveConfig  # noqa: E402
from quire.engine.listener import EngineListener  # noqa: E402
from quire.features.kv_tiers.copies import BlockCopies  # noqa: E402
from quire.features.kv_tiers.gate import KVTierGate  # noqa: E402
from quire.features.kv_tiers.pending import HOST, SentCopies  # noqa: E402
from quire.features.kv_tiers.swap import SwapSpace  # noqa: E402
from quire.features.kv_tiers.tier_counts import TierCounts  # noqa: E402
from quire.features.kv_tiers.transfers import BlockRead  # noqa: E402
from quire.kvstore.host_pool import HostPool  # noqa: E402
from quire.protocol.plan import StepPlan  # noqa: E402

Content = list[Any]


class ToyStore(dict[Any, Content]):
    why_off, is_open = "", True

    def is_everywhere(self, key: Any) -> bool:
        return key in self


class ToyStaging:
    """Slots, and ranks that say late what they have run."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.num_slots = rng.choice([2, 3, 5, 40])
        num_kept = random.Random(rng.random()).choice([0, 4, 300, 300])
        self.kept = range(self.num_slots, self.num_slots + num_kept)
        self.free = deque(range(self.num_slots))
        self.content: dict[int, Content] = {}
        self.ran = self.said = 0
        self.late: list[tuple[int, int, Content, bool]] = []
        """What a second rank has not copied yet: step, slot, content, whether the slot is filled."""

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def acknowledged(self) -> int:
        if self.rng.random() < 0.6:
            self.said = self.ran
            for _, slot, content, fills in self.late:
                assert slot not in self.free, "a slot is free before all ranks have copied"
                if fills:
                    self.content[slot] = content
                else:
                    assert self.content[slot] == content, "a slot is reused while a rank reads it"
            self.late.clear()
        return self.said

    def take(self) -> int | None:
        return self.free.popleft() if self.free else None

    def give_back(self, slot: int) -> None:
        assert slot not in self.free, "a slot is given back twice"
        self.content[slot] = ["garbage"]
        self.free.append(slot)


class ToyTransfers:
    """Threads that move some records in each turn, in any order."""

    def __init__(self, store: ToyStore, staging: ToyStaging, rng: random.Random):
        self.store, self.staging, self.rng = store, staging, rng
        self.read_rate = 0.0
        self.speed, self.misses = rng.choice([0.05, 0.5, 1.0]), rng.choice([0.0, 0.0, 0.1])
        self.fate = random.Random(0)
        self.full = 0.0
        """The share of records for which the store has no room."""
        self.reads: list[tuple[BlockRead, int]] = []
        self.writes: list[tuple[Any, int]] = []

    @property
    def num_writing(self) -> int:
        return len(self.writes)

    def read(self, keys: Any) -> BlockRead:
        read = BlockRead(keys, len(keys), 0.0)
        self.reads += [(read, place) for place in range(len(keys))]
        return read

    def cancel(self, read: BlockRead) -> None:
        read.is_cancelled = True
        for _, slot in read.arrived:
            self.staging.give_back(slot)
        read.arrived.clear()

    def write(self, key: Any, length: int, slot: int) -> None:
        self.writes.append((key, slot))

    def tick(self) -> None:
        for job in [job for job in self.writes if self.rng.random() < self.speed]:
            self.writes.remove(job)
            content = self.staging.content[job[1]]
            assert POISON not in content, "what a failed step wrote is kept"
            if self.fate.random() >= self.full:
                assert self.store.setdefault(job[0], content) == content, "two contents of one name"
            self.staging.give_back(job[1])
        for job in [job for job in self.reads if self.rng.random() < self.speed]:
            read, place = job
            if read.is_cancelled or place > read.first_bad:
                self.reads.remove(job)
            elif self.rng.random() < self.misses:
                read.first_bad, read.reason = place, "checksum"
                self.reads.remove(job)
            elif (slot := self.staging.take()) is not None:
                self.reads.remove(job)
                self.staging.content[slot] = list(self.store[read.keys[place][0]])
                read.arrived.append((place, slot))
                read.num_arrived += 1
                read.kinds[place] = "disk"


class PartStates(ToyStates):
    """States whose checkpoints are written in parts. One with parts of several states is wrong."""

    def __init__(self, num_parts: int):
        super().__init__()
        self.num_parts = num_parts

    def save(self, row: int, slot: int) -> None:
        self.checkpoints[slot] = [self.rows[row]] * self.num_parts

    def load(self, row: int, slot: int) -> None:
        self.loads += 1
        parts: Any = self.checkpoints[slot]
        self.rows[row] = parts[0] if len(set(map(str, parts))) == 1 else "torn"

    def lose(self) -> None:
        super().lose()
        self.checkpoints = {slot: ["lost"] * self.num_parts for slot in self.checkpoints}

    def copy(self, copies: BlockCopies, first: int, staging: ToyStaging, step: int) -> None:
        """As the worker's hook does, after rows have continued from checkpoints."""
        for slot, group, place in copies.saves:
            if group >= first:
                kept: Any = self.checkpoints[place]
                staging.content[slot] = ["half"]
                staging.late.append((step, slot, [kept[group - first], group - first], True))
        for slot, group, place in copies.loads:
            if group >= first:
                content = staging.content[slot]
                assert content[1] == group - first, "another part"
                staging.late.append((step, slot, content, False))
                self.checkpoints.setdefault(place, [None] * self.num_parts)
                self.checkpoints[place] = list(self.checkpoints[place])  # type: ignore[call-overload]
                self.checkpoints[place][group - first] = content[0]  # type: ignore[index]
        for place, before in copies.filled:
            if not before or self.saved_in.get(place) == before:
                self.saved_in[place] = step


class ToyRates:
    def __init__(self, rng: random.Random):
        self.rng, self.patience = rng, rng.choice([3, 40, 10_000])

    def loads_faster(
        self, num_tokens: int, num_bytes: int, read_rate: float, is_near: bool = False
    ) -> bool:
        return True

    def most_seconds(self, num_bytes: int, read_rate: float) -> float:
        return self.patience

    def step_seconds(self, num_tokens: int) -> float:
        return self.rng.choice([0.0, 1.0])


class TickingGate(KVTierGate):
    flaps: random.Random | None = None
    """Draws when the store is down, as a server may be."""

    def begin(self, running: Any) -> None:
        if self.flaps is not None:
            store: Any = self.store
            store.is_open = self.flaps.random() < 0.7
        self.transfers.tick()  # type: ignore[attr-defined]
        super().begin(running)

    def loaded(self, request: Any) -> bool | None:
        self.transfers.tick()  # type: ignore[attr-defined]
        return super().loaded(request)


class Forgets(EngineListener):
    def __init__(self, gate: KVTierGate):
        self.gate = gate

    def on_cache_reset(self) -> None:
        self.gate.on_cache_reset()

    def on_sleep(self, level: int) -> None:
        self.gate.on_cache_reset()


def add_tier(s: workload.Setting, seed: int, stores: dict[Any, ToyStore]) -> KVTierGate | None:
    kv, device, rng = s.scheduler.kv, s.device, random.Random(~seed ^ 77)
    if not kv.caching:
        return None
    num_groups, num_parts = len(kv.groups), 0
    if device.hook is not None:
        num_parts = random.Random(~seed ^ 55).choice([1, 2, 3])
        device.hook.states = device.states = PartStates(num_parts)
    name = kv.block_size, num_groups, num_parts
    flaps = random.Random(~seed ^ 88)
    store = (
        ToyStore()
        if s.faulty or random.Random(~seed ^ 88).random() < 0.15
        else stores.setdefault(name, ToyStore())
    )
    staging = ToyStaging(rng)
    transfers: Any = ToyTransfers(store, staging, rng)
    transfers.fate = random.Random(~seed ^ 87)
    transfers.full = transfers.fate.choice([0.0, 0.0, 0.0, 0.3])
    size, counts = kv.block_size, dict[str, float]()
    rates: Any = ToyRates(rng)
    gate = TickingGate(
        s.scheduler, transfers, [1] * num_groups, rates,
        policy=rng.choice(["auto", "second-use", "always", "always"]), may_save=lambda: rng.random() < 0.5,
        exact=True, counts=TierCounts(counts, [HOST, "disk"], ["disk"], ObserveConfig()), swap=SwapSpace(HostPool(staging.kept), kv.pool.by_hash, counts), clock=lambda: float(s.late.now),
        checkpoints=s.checkpoints.pool if s.checkpoints is not None else None, part_bytes=[1] * num_parts,
        boundary=s.checkpoints.boundary // size if s.checkpoints is not None else 1,
    )  # fmt: skip
    gate.flaps = flaps if flaps.random() < 0.15 else None
    s.scheduler.gates.append(gate)
    kv.pool.listeners.append(gate)
    s.core.listeners.append(Forgets(gate))
    run, share = device._run, device.failing_steps
    faults, failing = random.Random(~seed ^ 91), set[int]()
    on_taken, swap = gate.swap.on_taken, gate.swap

    def fail_what_writes_it(group: int, block: int, hash: bytes) -> None:
        """A block is taken whose content a step in flight writes: the step may fail."""
        if share and faults.random() < 0.5 and (step := swap.written.get((group, hash))):
            failing.add(step)
        on_taken(group, block, hash)

    swap.on_taken = fail_what_writes_it  # type: ignore[method-assign]

    def copy_and_run(plan: StepPlan) -> None:
        fails = rng.random() < share or plan.step in failing
        if share and gate.sent.get(plan.step, SentCopies()).swaps:
            fails |= faults.random() < 0.3
        device.failing_steps = float(fails)
        if (extra := plan.extras.get(gate.name)) is not None:
            copies = msgspec.msgpack.decode(extra, type=BlockCopies)
            for slot, group, block in copies.saves:
                assert slot not in staging.free
                if group >= num_groups:
                    continue
                content = device.memory[block * size : (block + 1) * size]
                staging.content[slot] = ["half"]
                if slot in staging.kept and not fails:
                    staging.content[slot] = content
                elif not fails:
                    staging.late.append((plan.step, slot, content, True))
            for slot, group, block in copies.loads:
                if group >= num_groups:
                    continue
                assert block, "the null block is loaded"
                content = staging.content[slot]
                if slot not in staging.kept:
                    staging.late.append((plan.step, slot, content, False))
                device.memory[block * size : (block + 1) * size] = (
                    [POISON] * size if fails else content
                )
        is_lost.clear()
        if fails and faults.random() < 0.5:
            is_lost.append(plan.step)
        staging.ran = plan.step
        run(plan)
        device.failing_steps = share

    is_lost = list[int]()  # the step that is running, if it fails before its copies of states
    if device.hook is not None:
        before: Any = device.hook.before

        def copy_states(plan: StepPlan, batch: Any) -> None:
            before(plan, batch)
            if (extra := plan.extras.get(gate.name)) is not None and plan.step not in is_lost:
                copies = msgspec.msgpack.decode(extra, type=BlockCopies)
                states.copy(copies, num_groups, staging, plan.step)

        states: Any = device.states
        device.hook.before = copy_states  # type: ignore[method-assign]
    device._run = copy_and_run  # type: ignore[method-assign]
    return gate


def trial(seed: int, stores: dict[Any, ToyStore], *, faulty: bool = False) -> dict[str, float]:
    """The counts of the gate after one random workload, checked. `faulty`: requests and steps fail, of the latter mostly those that
    matter to swap."""
    original, found = workload.draw_setting, []

    def drawn(seed: int) -> workload.Setting:
        s = original(seed)
        if faulty:
            s.faulty, s.device.failing_steps = True, random.Random(seed).choice([0.001, 0.01, 0.03])
        found.append(add_tier(s, seed, stores))
        return s

    workload.draw_setting = drawn
    try:
        workload.trial_of(seed)
    finally:
        workload.draw_setting = original
    gate = found[0]
    if gate is None:
        return {}
    for _ in range(5000):  # what is being written now
        if gate.staging.num_free == gate.staging.num_slots:
            break
        gate.begin(())
    assert gate.staging.num_free == gate.staging.num_slots, "slots leaked"
    assert not any([gate.loads, gate.running, gate.sent, gate.unsaved, gate.leaving])
    assert not gate.most_blocks
    assert not any([gate.states.pool.reserved, gate.states.unsaved, gate.states.leaving])
    swap, pool = gate.swap, gate.swap.pool
    assert not any(
        [swap.swapped, swap.leaving, swap.copying, pool._pinned, pool._pins, pool._outdated]
    )
    assert len(pool) + len(set(pool._free)) == pool.num_slots, "slots of the swap space leaked"
    return gate.counts.counts


def main(trials: int, first: int = 0, *, faulty: bool = False) -> dict[str, float]:
    logging.disable(logging.CRITICAL)  # these workloads preempt, and fail steps, on purpose
    stores: dict[Any, ToyStore] = {}
    total: dict[str, float] = {}
    try:
        for seed in range(first, first + trials):
            try:
                for name, number in trial(seed, stores, faulty=faulty).items():
                    total[name] = total.get(name, 0) + number
            except BaseException:
                print(f"seed {seed}", file=sys.stderr)
                raise
    finally:
        logging.disable(logging.NOTSET)
    return total


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:])))
