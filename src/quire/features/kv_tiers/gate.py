"""KVTierGate: loads kept blocks for waiting requests, and saves blocks that requests have computed.

Knows requests, blocks and steps. Does not know files or tensors: `transfers.py` moves records between a store and slots of host
memory, `hook.py` moves slots from and to blocks.

    load    names after the cached prefix -> threads read records into slots, and check them -> the request owns the blocks, the
            hook copies -> the request gets its row. A record that is missing, late or wrong ends the load there: the rest is
            computed.
    save    a step that wrote the block is committed -> the hook copies it to a slot, before the next step -> all ranks have
            done so -> a thread writes the slot. A block that is taken for other content before is copied by the plan that
            takes it; if there is no slot, it is not kept.
    swap    blocks of preempted requests go to slots of host memory, and come back from there (`swap.py`).

A model with recurrent states also needs the state at the end of what is loaded (`states.py`).
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec

from quire.features.kv_tiers.copies import NAME, BlockCopies
from quire.features.kv_tiers.kept_prefix import KeptPrefix
from quire.features.kv_tiers.pending import HOST, LoadCopy, SentCopies, TierLoad
from quire.features.kv_tiers.rates import TierRates
from quire.features.kv_tiers.states import KeptStates
from quire.features.kv_tiers.swap import SwapSpace
from quire.features.kv_tiers.tier_counts import LOAD_SIZE, LOOKUP, STORE_SIZE, TierCounts
from quire.features.kv_tiers.transfers import Transfers
from quire.kvcache.block_pool import NULL_BLOCK
from quire.kvcache.checkpoints import CheckpointPool
from quire.kvstore.disk import Key
from quire.kvstore.host_pool import HostPool
from quire.protocol.plan import StepPlan
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler

MOST_PENDING = 65_536
"""Blocks that wait to be saved; more are not kept."""
SAVE_S = 0.002
"""How long a step may copy blocks that are saved, but for those that it overwrites ..."""
SAVE_SHARE = 0.03
"""... and, if it computes much of a prompt, this share of its time."""
COPY_RATE = 2e9
"""Bytes per second of a copy in memory, as one thread reaches at least."""
ALL = 1 << 62

Policy = Literal["auto", "second-use", "always"]


class KVTierGate(Gate):
    """Plug it into the scheduler, and into its block pool as a listener.

    Args:
        group_bytes: of a block, by KV group, over all ranks.
        policy: which blocks are saved.
        may_save: whether the store takes a block now that only one request has used.
        exact: whether generated tokens have the same keys and values as in a prompt; if not, only prompts are kept.
        swap: for blocks of preempted requests; None: these are computed again.
        checkpoints: recurrent states that are kept, too; None: none are. `part_bytes`, `boundary`: as in `KeptStates`.
    """

    name = NAME
    order = 95  # after the gate of checkpoints, whose plan overwrites states that are saved
    meets_limits = True

    def __init__(
        self,
        scheduler: Scheduler,
        transfers: Transfers,
        group_bytes: Sequence[int],
        rates: TierRates,
        *,
        policy: Policy,
        may_save: Callable[[], bool],
        exact: bool,
        counts: TierCounts,
        swap: SwapSpace | None = None,
        checkpoints: CheckpointPool | None = None,
        part_bytes: Sequence[int] = (),
        boundary: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.swap = swap or SwapSpace(HostPool(()), scheduler.kv.pool.by_hash, counts.counts)
        self.saves_preempted = self.swap.is_on
        self.scheduler, self.kv, self.transfers = scheduler, scheduler.kv, transfers
        self.store, self.staging = transfers.store, transfers.staging
        self.group_bytes, self.rates, self.clock = group_bytes, rates, clock
        self.record_bytes = [*group_bytes, *part_bytes]
        self.states = KeptStates(
            CheckpointPool(0) if checkpoints is None else checkpoints, self.store, len(group_bytes), part_bytes, boundary,
            self._is_committed, partial(counts.add, "kv_stores_skipped"),
        )  # fmt: skip
        self.prefix = KeptPrefix(self.kv, self.store, self.swap, self.states, group_bytes)
        self.policy, self.may_save, self.exact, self.counts = policy, may_save, exact, counts
        self.loads: dict[Request, TierLoad] = {}
        self.most_blocks: dict[Request, int] = {}  # after a load that failed
        self.running: dict[Request, int] = {}  # how many leading blocks of each were considered
        self.unsaved: OrderedDict[Key, tuple[int, int]] = OrderedDict()  # block, step that wrote it
        self.leaving: list[tuple[Key, int]] = []  # taken for other content in the next plan
        self.generated: set[Key] = (
            set()
        )  # blocks in the cache with tokens that a step drew, if these are not kept
        self.to_load: list[LoadCopy] = []
        self.sent: dict[int, SentCopies] = {}  # by step

    # -- loads ------------------------------------------------------------------------------------
    def can_load(self, request: Request, start: int) -> int:
        size = self.kv.block_size
        first = start // size
        most = min(
            (len(request.tokens) - 1) // size,
            len(request.hashes),
            self.most_blocks.get(request, ALL),
        )
        if most <= first or not (self.store.is_open or self.swap.is_on):
            return 0
        began = time.perf_counter()
        end = self.prefix.end(request, first, most)
        self.counts.observe(LOOKUP, time.perf_counter() - began)
        return (end - first) * size if end > first and self._is_worth_it(request, first, end) else 0

    def _is_worth_it(self, request: Request, first: int, end: int) -> bool:
        num_tokens = (end - first) * self.kv.block_size
        num_bytes = (end - first) * sum(self.group_bytes)
        if more := self.states.bytes_to_load(request.hashes[end - 1]):
            num_bytes += more
        elif request in self.swap.swapped:
            return self.rates.loads_faster(num_tokens, num_bytes, COPY_RATE, is_near=True)
        return self.rates.loads_faster(num_tokens, num_bytes, self.transfers.read_rate)

    def load(self, request: Request, start: int, num_tokens: int) -> None:
        size = self.kv.block_size
        found = [
            (group, column[index], request.hashes[index])
            for index in range(start // size, (start + num_tokens) // size)
            for group, column in enumerate(request.blocks)
            if column[index] != NULL_BLOCK and self.group_bytes[group]
        ]
        near = self.swap.load(request, found)
        found = [one for one in found if (one[0], one[2]) not in self.swap.pool]
        keys = [(group, hash) for group, _, hash in found]
        blocks = [block for _, block, _ in found]
        end = request.hashes[(start + num_tokens) // size - 1]
        if (state := self.states.begin_load(end)) is not None:
            keys += self.states.keys(end)
            blocks += [state.slot] * state.num_left
        sized = [(key, self.record_bytes[key[0]]) for key in keys]
        seconds = self.rates.most_seconds(sum(n for _, n in sized), self.transfers.read_rate)
        read = self.transfers.read(sized)
        self.loads[request] = TierLoad(
            blocks, num_tokens, self.clock() + seconds, read, near, state
        )

    def loaded(self, request: Request) -> bool | None:
        load = self.loads[request]
        if load.is_ready:
            return True
        if (bad := load.read.first_bad) < len(load.read.keys):
            self.counts.add("kv_load_failures:" + load.read.reason)
            hash = load.read.keys[bad][0][1]
            self.most_blocks[request] = request.hashes.index(hash)
            return False
        if self.clock() > load.deadline:
            self.counts.add("kv_load_failures:late")
            self.most_blocks[request] = 0
            return False
        return None

    def enter(self, request: Request) -> None:
        self.running[request] = 0
        step = self.scheduler.steps + 1
        num_found = request.num_computed_tokens // self.kv.block_size
        if (load := self.loads.pop(request, None)) is not None:
            self.to_load += load.near + self._arrived(request, load)
            self.swap.on_written(request, request.num_cached_blocks, num_found, step)
            num_bytes = sum(self.group_bytes[one.key[0]] for one in load.near)
            self.counts.add("kv_load_bytes:" + HOST, num_bytes)
            self.counts.observe(LOAD_SIZE, num_bytes + sum(n for _, n in load.read.keys))
        if not (request.preemptions or request.params.skip_reading_prefix_cache):
            self._count_look_up(request, load)
        self.swap.returned(request)
        self._consider(request, num_found, step, is_reused=True)

    def _count_look_up(self, request: Request, load: TierLoad | None) -> None:
        size, num_loaded = self.kv.block_size, load.num_tokens if load is not None else 0
        num_cached = request.num_computed_tokens - num_loaded
        request.loaded_tokens = load.tokens_by_kind(size) if load is not None else {}
        if load is not None or self.store.is_open or self.swap.is_on:
            num_blocks = (request.num_prompt - 1) // size - num_cached // size
            self.counts.looked_for(num_blocks, size, request.loaded_tokens)

    def release(self, request: Request) -> bool:
        if (load := self.loads.pop(request, None)) is not None:
            self.transfers.cancel(load.read)
            self._unpin(load.near)
            if load.state is not None:
                self.states.cancel(load.state)
        return True

    def revoke(self, request: Request) -> None:
        self.release(request)

    def on_waiting_ended(self, request: Request) -> None:
        self.most_blocks.pop(request, None)
        self.swap.returned(request)

    def leave(self, request: Request) -> None:
        self._consider_published(request, self.scheduler.steps)
        self.running.pop(request, None)
        self.most_blocks.pop(request, None)
        if request.finish is None:
            self.swap.preempted(request)

    def _unpin(self, loads: Sequence[LoadCopy]) -> None:
        """These slots of host memory are not read any more, except by copies that are sent."""
        for one in loads:
            if one.slot >= self.staging.num_slots:
                self.swap.pool.unpin(one.key)

    def _arrived(self, request: Request, load: TierLoad) -> list[LoadCopy]:
        """What can be copied now."""
        found = []
        while load.read.arrived:
            place, slot = load.read.arrived.popleft()
            found.append(LoadCopy(slot, load.read.keys[place][0], load.blocks[place], request))
        return found

    # -- saves ------------------------------------------------------------------------------------
    def _consider_published(self, request: Request, step: int) -> None:
        """Save what the request has published, which the steps up to this one write."""
        num_blocks, of_prompt = (
            request.num_published_blocks,
            request.num_prompt // self.kv.block_size,
        )
        if not self.exact and num_blocks > of_prompt:
            for index in range(of_prompt, num_blocks):
                self.generated.update(
                    (g, request.hashes[index]) for g in range(len(request.blocks))
                )
        if num_blocks > (start := self.running.get(request, ALL)):
            self.swap.on_written(request, start, num_blocks, step)
            self._consider(request, num_blocks, step, is_reused=False)

    def _consider(self, request: Request, num_blocks: int, step: int, *, is_reused: bool) -> None:
        """Save the request's blocks up to this one, as far as the policy keeps them and the store lacks them."""
        start, self.running[request] = self.running[request], num_blocks
        if not is_reused and not self._keeps_first_use():
            return
        for index in range(start, num_blocks):
            for group, column in enumerate(request.blocks):
                block, key = column[index], (group, request.hashes[index])
                if block == NULL_BLOCK or not self.group_bytes[group] or key in self.unsaved:
                    continue
                if key not in self.generated and not self.store.is_everywhere(key):
                    self.unsaved[key] = block, step
        while len(self.unsaved) > MOST_PENDING:
            self.unsaved.popitem(last=False)
            self.counts.add("kv_stores_skipped")

    def _is_wanted_state(self, hash: bytes, is_reused: bool) -> bool:
        return (is_reused or self._keeps_first_use()) and (0, hash) not in self.generated

    def _keeps_first_use(self) -> bool:
        return self.policy == "always" or (self.policy == "auto" and self.may_save())

    def on_publish(self, group: int, block: int, hash: bytes) -> None:
        """Nothing: requests are asked what they have published (`_consider_published`)."""

    def on_forget(self, group: int, block: int, hash: bytes) -> None:
        """A block that is taken for other content is copied by the plan that takes it, at the latest."""
        key, pool = (group, hash), self.kv.pool
        self.generated.discard(key)
        is_taken = pool.refs[block] == 0 and block not in pool.free
        if is_taken:
            self.swap.on_taken(group, block, hash)
        if self.unsaved.get(key, (NULL_BLOCK, 0))[0] != block:
            return
        _, step = self.unsaved.pop(key)
        if is_taken and self._is_committed(step):
            self.leaving.append((key, block))
        else:
            self.counts.add("kv_stores_skipped")

    def _is_committed(self, step: int) -> bool:
        scheduler = self.scheduler
        return step <= scheduler.steps and step < min(scheduler.in_flight, default=ALL)

    def _choose_saves(self, num_tokens: int) -> list[tuple[Key, int]]:
        """Which blocks this plan copies to slots, and parts of states: those that it overwrites first, then the oldest."""
        chosen, self.leaving = self.leaving, []
        if not self.store.is_open:  # what leaves now cannot be saved later
            self.states.leaving.clear()
            return []
        limit = len(chosen) + (most := self._num_saves(num_tokens))
        chosen += self.states.choose(-(-most // 2), most)
        for key, (block, step) in list(itertools.islice(self.unsaved.items(), limit)):
            if len(chosen) >= limit or not self._is_committed(step):
                break
            del self.unsaved[key]
            if self.kv.pool.hash_of.get(block) == key:
                chosen.append((key, block))
        return chosen

    def _num_saves(self, num_tokens: int) -> int:
        """How many blocks a step with this many tokens may copy. Half of the slots are for loads."""
        room = self.staging.num_free - self.staging.num_slots // 2
        if num_tokens:
            seconds = max(SAVE_S, SAVE_SHARE * self.rates.step_seconds(num_tokens))
            room = min(room, max(1, int(seconds * COPY_RATE / max(self.record_bytes))))
        return max(room, 0)

    # -- plans ------------------------------------------------------------------------------------
    def begin(self, running: Sequence[Request]) -> None:
        self._finish_copies()
        self.counts.put("kv_active_loads", len(self.loads))
        num_unsaved = len(self.unsaved) + len(self.states.unsaved)
        self.counts.put("kv_active_saves", num_unsaved + self.transfers.num_writing)
        self.swap.settle(min(self.scheduler.in_flight, default=ALL))

    def wants_plan(self) -> bool:
        unsaved = self.unsaved or self.leaving or self.states.unsaved or self.states.leaving
        return bool(unsaved or self.swap.leaving or self.sent)

    def data_for_hook(self, plan: StepPlan) -> bytes | None:
        for request, num_considered in self.running.items():
            if request.num_published_blocks > num_considered:
                self._consider_published(request, plan.step)
        self.states.consider(plan.step, self._is_wanted_state)
        if self.store.why_off:
            self.forget_unsaved()
        sent = SentCopies(loads=self.to_load)
        self.to_load = []
        copies = BlockCopies()
        for request, load in self.loads.items():
            arrived = self._arrived(request, load)
            sent.loads += arrived
            num_parts = sum(self.states.is_part(one.key) for one in arrived)
            if load.state is not None and num_parts:
                sent.states.append(load.state)
                copies.filled.append((load.state.slot, load.state.last_step))
                self.states.copied(load.state, num_parts, plan.step)
        copies.loads += [(one.slot, one.key[0], one.block) for one in sent.loads]
        num_tokens = sum(item.num_tokens for item in plan.work)
        for key, block in self._choose_saves(num_tokens):
            if (slot := self.staging.take()) is None:
                self.counts.add("kv_stores_skipped")
                continue
            sent.saves.append((slot, key))
            copies.saves.append((slot, key[0], block))
        for slot, key, block in self.swap.take_leaving():
            sent.swaps.append((slot, key))
            copies.saves.append((slot, key[0], block))
            self.counts.add("kv_store_bytes:" + HOST, self.group_bytes[key[0]])
        self._unpin(sent.loads)
        if copies.saves:
            self.counts.observe(STORE_SIZE, sum(self.record_bytes[g] for _, g, _ in copies.saves))
        if not copies.saves and not copies.loads:
            return None
        self.sent[plan.step] = sent
        return msgspec.msgpack.encode(copies)

    def _finish_copies(self) -> None:
        """Take back the slots of copies that all ranks have run, and write those that were filled."""
        acknowledged = self.staging.acknowledged
        for step in [step for step in self.sent if step <= acknowledged]:
            if not self._is_committed(step):
                break
            sent = self.sent.pop(step)
            for one in sent.loads:
                if one.slot < self.staging.num_slots:
                    self.staging.give_back(one.slot)
            for slot, key in sent.swaps:
                self.swap.copied(slot, key, is_right=not (sent.has_failed or sent.is_outdated))
            for slot, key in sent.saves:
                if sent.has_failed:
                    self.staging.give_back(slot)
                else:
                    self.transfers.write(key, self.record_bytes[key[0]], slot)

    def failed(self, step: int) -> set[int]:
        """What the step wrote is wrong, and so are its copies."""
        for key in [key for key, (_, written) in self.unsaved.items() if written >= step]:
            del self.unsaved[key]
        self.states.failed(step)
        if (sent := self.sent.get(step)) is None:
            return set()
        sent.has_failed = True
        hash_of, wrong = self.kv.pool.hash_of, set[int]()
        for one in sent.loads:
            if self.states.is_part(one.key):
                first = one.request.num_cached_blocks  # it must not go on from this state
                wrong.update(b for column in one.request.blocks for b in column[first:])
            elif hash_of.get(one.block) == one.key or one.block in one.request.blocks[one.key[0]]:
                wrong.add(one.block)
        for state in sent.states:
            self.states.failed_load(state)
        return wrong - {NULL_BLOCK}

    def forget_unsaved(self) -> None:
        """The cache loses its content, or the store is off: nothing of it is saved any more."""
        self.unsaved.clear()
        self.leaving.clear()
        self.generated.clear()
        self.states.forget_unsaved()

    def on_cache_reset(self) -> None:
        self.forget_unsaved()
        for sent in self.sent.values():
            sent.is_outdated = True
        self.swap.clear()
