"""The rules of the scheduler and the KV cache that the random workloads must notice when they are broken.

A change to the scheduler or the block manager adds a line here.
"""

from __future__ import annotations

import workload

from tests.broken_rule import broken

TRIALS = 4000
FIRST = {"a failed row's blocks stay published": 850, "loaded blocks are for no one": 4890}
"""Where the workloads begin that notice a mutation late. (When they change, it may be elsewhere: that only takes longer.)"""

SCHEDULER, BUILDING = "quire.scheduler.scheduler", "quire.scheduler.plan_builder"
MANAGER, POOL = "quire.kvcache.manager", "quire.kvcache.block_pool"
HASHING, HELD = "quire.kvcache.block_hash", "quire.scheduler.held_blocks"
CHECKPOINTS, STATES = "quire.features.state_checkpoints.gate", "quire.worker.state_hook"
KEPT = "quire.kvcache.checkpoints"
QUEUES, FAIR = "quire.scheduler.waiting_queue", "quire.features.fair_share.fair_queue"

# name -> the arguments of `broken`
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "publish before the plan is final": (
        SCHEDULER, "Scheduler.plan",
        "builder.add_work(ANY, ANY, ANY, ANY)",
        "builder.add_work(request, num_tokens, new_blocks, self.limits.drafts); self.kv.publish(request)",
    ),
    "re-admitted with tokens pending": (SCHEDULER, "Scheduler._admit", "request.num_pending_tokens", "False"),
    "rejected drafts stay computed": (SCHEDULER, "Scheduler.commit", "request.num_computed_tokens -= ANY", ""),
    "added tokens are dropped": (SCHEDULER, "Scheduler.commit", "self._extend(request, added)", "[]"),
    "added tokens count as computed": (
        SCHEDULER, "Scheduler.commit", "tokens = tokens + self._extend(request, added)",
        "tokens = tokens + self._extend(request, added); request.num_computed_tokens += len(added)",
    ),
    "no limit to running ahead": (SCHEDULER, "Scheduler._num_new_tokens", "length >= request.limit", "False"),
    "running ahead where it may not": (SCHEDULER, "Scheduler._num_new_tokens", "self.limits.run_ahead", "True"),
    "preemption keeps the work of this plan": (SCHEDULER, "Scheduler._preempt_for_blocks", "builder.remove_work(ANY)", "pass"),
    "undo forgets the pending tokens": (BUILDING, "PlanBuilder.remove_work", "request.num_pending_tokens -= ANY", ""),
    "admission after preemption in the same plan": (SCHEDULER, "Scheduler.plan", "builder.preempted", "False"),
    "preempts the first come": (
        QUEUES, "WaitingQueue.victim_for_blocks", "max(ANY, key=ANY)", "min(running, key=lambda r: r.order)",
    ),
    "the queue forgets who came first": (QUEUES, "_backwards", "-number", "number"),
    "a tenant's end is not told": (SCHEDULER, "Scheduler._end", "self.waiting.on_finished(ANY)", "pass"),
    "the oldest is preempted": (FAIR, "FairQueue.victim_for_row", "lambda r: r.order", "lambda r: tuple(-part for part in r.order)"),
    "a gate's stop is a skip": (
        SCHEDULER, "Scheduler._admit",
        "if not (num_tokens := self._give_blocks(ANY, ANY)): break",
        "if not (num_tokens := self._give_blocks(request, builder.budget)): continue",
    ),
    "a gate's skip is a stop": (SCHEDULER, "Scheduler._waiting_and_ready", "break", "return"),
    "a gate is not asked": (SCHEDULER, "Scheduler._waiting_and_ready", "not gate.ready(ANY)", "False"),
    "a gate is not told who left": (SCHEDULER, "Scheduler._leave", "gate.leave(ANY)", "pass"),
    "a gate is not told who gave up": (SCHEDULER, "Scheduler._end", "gate.on_waiting_ended(ANY)", "pass"),
    "a gate is told a wrong place": (SCHEDULER, "Scheduler._num_new_tokens", "gate.allow(ANY, ANY, ANY)", "gate.allow(request, request.num_computed_tokens, num_new_tokens)"),
    "a gate cannot hold blocks back": (HELD, "HeldBlocks.release", "not gate.release(ANY)", "gate.release(request) is None"),
    "blocks are held back for ever": (SCHEDULER, "Scheduler.plan", "self.held_blocks.retry()", "pass"),
    "re-admitted while its blocks are held back": (
        SCHEDULER, "Scheduler._waiting_and_ready", "request in self.held_blocks", "False",
    ),
    "preempts others while blocks are held back": (SCHEDULER, "Scheduler.plan", "self.held_blocks.of_preempted()", "False"),
    "sleep leaves blocks held back": (SCHEDULER, "Scheduler.preempt_all", "self.held_blocks.revoke()", "pass"),
    "a row before its blocks are filled": (HELD, "HeldBlocks.__contains__", "request in self._loading or request in self._kept", "request in self._kept"),
    "a load that failed counts": (HELD, "HeldBlocks.retry", "not loaded", "False"),
    "a load may cover all": (HELD, "HeldBlocks.find_load", "len(request.tokens) - 1", "len(request.tokens)"),
    "a load goes beyond the last checkpoint": (HELD, "HeldBlocks.find_load", "num_blocks = self.kv.usable(ANY, ANY, ANY) - ANY", ""),
    "a loaded request enters without its checkpoint": (HELD, "HeldBlocks.start", "self.kv.usable(ANY, ANY, ANY) < num_blocks", "False"),
    "a loaded request gets more tokens than blocks": (
        SCHEDULER, "Scheduler._give_blocks", "min(budget, request.capacity - start)", "budget",
    ),
    "loaded blocks are for no one": (SCHEDULER, "Scheduler._give_blocks", "self.held_blocks.take_back_last(also_loading=False)", "False"),
    "preempts before it takes blocks back": (SCHEDULER, "Scheduler.plan", "self.held_blocks.take_back_last(also_loading=True)", "False"),
    "an abort keeps the blocks of a load": (SCHEDULER, "Scheduler._end", "self.held_blocks.take_back(ANY)", "pass"),
    "blocks are free while they are filled": (HELD, "HeldBlocks.take_back", "self.release(request, [gate])", "self.release(request, [])"),
    "blocks taken back count as computed": (HELD, "HeldBlocks.take_back", "request.num_computed_tokens = 0", ""),
    "sleep leaves a load": (HELD, "HeldBlocks.revoke", "[*self._loading.items(), *self._loaded.items()]", "[*self._loaded.items()]"),
    "gates are not told of a failed step": (SCHEDULER, "Scheduler.fail_step", "gate.failed(step)", "set()"),
    "blocks outside a window are filled": (MANAGER, "KVManager.admit", "group.spec.first_needed(start) // self.block_size", "0"),
    "a listener does not hear what is published": (POOL, "BlockPool.publish", "listener.on_publish(ANY, ANY, ANY)", "pass"),
    "a listener does not hear what is forgotten": (POOL, "BlockPool.forget", "listener.on_forget(ANY, ANY, ANY)", "pass"),
    "a gate is not told that its blocks are gone": (HELD, "HeldBlocks.revoke", "gate.revoke(ANY)", "pass"),
    "a request without tokens draws": (
        BUILDING, "PlanBuilder.add_work", "WorkItem(ANY, ANY, ANY, ANY, request.generates)", "WorkItem(request.row, num_tokens, new_blocks, num_drafts)",
    ),
    "a request without tokens does not end": (SCHEDULER, "Scheduler.commit", 'self._end(request, "stop")', "pass"),
    "a request without tokens lacks one": (SCHEDULER, "Scheduler.commit", "not request.generates", "False"),
    "rows are not given back": (SCHEDULER, "Scheduler._leave", "self.free_rows.append(ANY)", "pass"),
    "workers are not told which rows are free": (SCHEDULER, "Scheduler._leave", "self.freed_rows.append(ANY)", "pass"),
    "stops before min_tokens": (SCHEDULER, "Scheduler._extend", "ANY > request.min_length", "True"),
    "tokens after the end": (SCHEDULER, "Scheduler._extend", "tokens = tokens[:count]", ""),
    "a failed row's blocks stay published": (SCHEDULER, "Scheduler._fail", "self.kv.retract(ANY)", "set()"),
    "an abort leaves the request in the queue": (SCHEDULER, "Scheduler._end", "self.waiting.remove(ANY)", "pass"),
    "a prefix match may cover all": (
        MANAGER, "KVManager.match", "len(request.tokens) - 1", "len(request.tokens)",
    ),
    "admission counts idle shared blocks as free": (MANAGER, "KVManager.admit", "ANY - idle", "len(self.pool.free)"),
    "a prefix goes beyond a gap in a window": (MANAGER, "KVManager._longest_prefix", "count = min(gap for gap in ANY if ANY)", "return count"),
    "a window is a block too narrow": (
        MANAGER, "KVManager._leave_windows",
        "ANY // self.block_size - 1", "spec.first_needed(position) // self.block_size",
    ),
    "a window moves with tokens that may be taken back": (
        MANAGER, "KVManager._leave_windows", "min(ANY, ANY)", "request.num_computed_tokens",
    ),
    "a window's blocks are released twice": (MANAGER, "KVManager._leave_windows", "column[index] = NULL_BLOCK", ""),
    "blocks outside a window are kept": (MANAGER, "KVManager.grow", "self._leave_windows(ANY)", "pass"),
    "unknown tokens are published": (MANAGER, "KVManager.publish", "min(ANY, ANY)", "len(request.tokens)"),
    "a taken block keeps its hash": (POOL, "BlockPool.allocate", "self.forget(ANY)", "pass"),
    "sharing leaves a block free": (POOL, "BlockPool.share", "del self.free[ANY]", ""),
    "the hash ignores the adapter": (HASHING, "Hasher.root", "adapter is None", "True"),
    "the hash ignores the salt": (
        HASHING, "Hasher.root", 'f"{ANY}:{len(salt)}:{salt}{named}"', 'f"{self.identity}:{named}"',
    ),
    "the hash ignores the parent": (HASHING, "Hasher.extend", "hashes[-1] if hashes else root", "root"),
    "a state is not cleared": (STATES, "StateHook.enter", "self.states.clear(ANY)", "pass"),
    "a state is not restored": (STATES, "StateHook.before", "self.states.load(ANY, ANY)", "pass"),
    "a prefix goes beyond the last checkpoint": (MANAGER, "KVManager.match", "count and (usable := self.usable(request, found, count)) < count", "False"),
    "a state is restored from another boundary": (CHECKPOINTS, "CheckpointGate.enter", "self._hash(request, request.num_computed_tokens)", "[*self.pool.junctions, *self.pool.ends][-1]"),
    "a checkpoint is named by the block after it": (CHECKPOINTS, "CheckpointGate._hash", "request.hashes[number - 1]", "request.hashes[min(number, len(request.hashes) - 1)]"),
    "checkpoints outlive the cache": (MANAGER, "KVManager.reset", "limit.reset()", "pass"),
    "an evicted checkpoint is found": (KEPT, "CheckpointPool._take", "table.popitem(last=False)", "next(iter(table.items()))"),
}  # fmt: skip


def noticed(name: str, trials: int = TRIALS) -> str | None:
    """Which workload detects a broken rule, and its error; None: they all pass."""
    with broken(*MUTATIONS[name]):
        first = FIRST.get(name, 0)
        for seed in range(first, first + trials):
            try:
                workload.trial(seed)
            except Exception as error:
                return f"seed {seed}: {type(error).__name__}: {error}"
    return None
