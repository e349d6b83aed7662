"""Random workloads on the toy device: every output equals a step-by-step reference, and nothing leaks.

`python tests/engine/workload.py 6000` runs many by hand; mutations.py runs them on a broken scheduler.
"""

from __future__ import annotations

import logging
import random
import sys
from dataclasses import dataclass, field

from loading_gates import LoadingGate, Store
from toy_device import VOCAB, ToyDevice, next_token, pooled

from quire.engine.core import EngineCore
from quire.engine.sleep import SleepController
from quire.features.fair_share.fair_queue import FairQueue
from quire.features.state_checkpoints.gate import CheckpointGate
from quire.kvcache.block_hash import Hasher
from quire.kvcache.block_pool import NULL_BLOCK, BlockPool
from quire.kvcache.checkpoints import CheckpointPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec, CrossAttentionSpec, WindowSpec
from quire.protocol.output import EngineOutput
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import Abort, EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.gate import Gate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import NO_ROW
from quire.scheduler.scheduler import Scheduler

MOST_STATES = 21  # of an encoder


class OneAdapterGate(Gate):
    """At most one adapter runs at once; a request with another one blocks the requests after it."""

    name = "one adapter"

    def __init__(self):
        self.active: dict[str, int] = {}

    def allow(self, request, start, num_tokens):
        fits = request.adapter is None or request.adapter in self.active or not self.active
        return num_tokens if fits else 0

    def enter(self, request):
        if request.adapter:
            self.active[request.adapter] = self.active.get(request.adapter, 0) + 1

    def leave(self, request):
        if request.adapter:
            self.active[request.adapter] -= 1
            if not self.active[request.adapter]:
                del self.active[request.adapter]


class FirstBiteGate(Gate):
    """Limits the tokens of each request in a step, so that others enter after an unfinished prompt."""

    name = "first bite"

    def __init__(self, limit: int):
        self.limit = limit

    def allow(self, request, start, num_tokens):
        return min(num_tokens, self.limit)


class PieceGate(Gate):
    """No step computes tokens of two pieces of a prompt, as for a resource that covers one piece."""

    name = "piece"

    def __init__(self, size: int):
        self.size = size

    def allow(self, request, start, num_tokens):
        assert start < request.length
        if request.row != NO_ROW:
            assert start == request.num_computed_tokens
        if start + num_tokens <= request.num_prompt:
            return min(num_tokens, self.size - start % self.size)
        return num_tokens

    def data_for_hook(self, plan):
        rows = {request.row: request for request in self.scheduler.running}
        for item in plan.work:
            end = rows[item.row].num_computed_tokens
            if end <= rows[item.row].num_prompt:
                assert (end - item.num_tokens) // self.size == (end - 1) // self.size
        return


class HoldingGate(Gate):
    """Holds the blocks of some requests back for a while; meanwhile no request may write to them."""

    name = "holding"

    def __init__(self, rng: random.Random, share: float):
        self.rng, self.share = rng, share
        self.left: dict = {}  # how often it still answers False, by request
        self.blocks: dict = {}
        self.count = self.revoked = 0

    def release(self, request):
        assert request.row == NO_ROW
        if request not in self.left:
            if self.rng.random() >= self.share:
                return True
            self.count += 1
            self.left[request] = self.rng.randint(1, 5)
            self.blocks[request] = [list(column) for column in request.blocks]
        assert request.blocks == self.blocks[request]
        self.left[request] -= 1
        if self.left[request]:
            return False
        del self.left[request], self.blocks[request]
        return True

    def revoke(self, request):
        del self.left[request], self.blocks[request]
        self.revoked += 1

    def enter(self, request):
        assert request not in self.left, f"{request.id} enters while its blocks are held back"

    def data_for_hook(self, plan):
        held = {b for columns in self.blocks.values() for column in columns for b in column}
        taken = [b for item in plan.work for column in item.new_blocks for b in column]
        size = self.scheduler.kv.block_size
        for new in plan.entered:  # it may share the first blocks
            taken += [b for column in new.blocks for b in column[new.num_computed_tokens // size :]]
        assert not held.intersection(taken) - {NULL_BLOCK}, "blocks that are held back are taken"
        return


class LateGate(Gate):
    """Some requests are not ready before a tick of the test's clock; others overtake them."""

    name = "late"

    def __init__(self):
        self.now = 0
        self.ready_at: dict[str, int] = {}
        self.entered_early: list[str] = []
        self.prepared: set[str] = set()

    def ready(self, request):
        self.prepared.add(request.id)
        return self.now >= self.ready_at.get(request.id, 0)

    def enter(self, request):
        if not self.ready(request):
            self.entered_early.append(request.id)
        self.prepared.discard(request.id)

    def on_waiting_ended(self, request):
        self.prepared.discard(request.id)


class WitnessGate(Gate):
    """Asserts which requests may enter, and which must be preempted."""

    name = "witness"
    scheduler: Scheduler

    def __init__(self, late: LateGate):
        self.late = late
        self.preempted_at = -1  # the turn of the last preemption
        self.awake = True

    def enter(self, request):
        if not isinstance(self.scheduler.waiting, FairQueue):  # a FairQueue may preempt and admit
            assert self.preempted_at != self.late.now, "a plan that preempts admits nobody"
        for other in self._beside(request, self.scheduler.waiting):
            if other.order < request.order and other.row == NO_ROW:
                held = other in self.scheduler.held_blocks
                assert held or not self.late.ready(other), f"{request.id} overtakes {other.id}"

    def leave(self, request):
        if request.finish is None:  # preempted
            self.preempted_at = self.late.now
            beside = self._beside(request, self.scheduler.running)
            least = max([request, *beside], key=lambda r: r.order)
            assert least is request, f"{request.id} is preempted before {least.id}"
            if not isinstance(self.scheduler.waiting, FairQueue) and self.awake:
                held = self.scheduler.held_blocks
                assert not held.of_preempted(), "preempts, though blocks will be free soon"
                owners = [r for r in self.scheduler.waiting if r.blocks and any(r.blocks[0])]
                assert not owners, "preempts, though requests without a row own blocks"

    def _beside(self, request, others):
        """The requests that this one's order is compared with: all, or its tenant's."""
        fair = isinstance(self.scheduler.waiting, FairQueue)
        return [r for r in others if not fair or r.tenant == request.tenant]


class RememberingHasher(Hasher):
    """Records the tokens of each hash."""

    def __init__(self, block_size: int):
        super().__init__(block_size, b"secret")
        self.tokens_of: dict[bytes, list[int]] = {}

    def extend(self, hashes, root, tokens, media=()):
        first = len(hashes)
        super().extend(hashes, root, tokens, media)
        for index in range(first, len(hashes)):
            start = index * self.block_size
            self.tokens_of[hashes[index]] = tokens[start : start + self.block_size]


def reference(asked: EngineRequest) -> tuple[list[int], str]:
    tokens, params = list(asked.tokens), asked.params
    if isinstance(params, PoolingParams):
        return [], "stop"
    while True:
        tokens.append(next_token(tokens, asked.adapter))
        output = len(tokens) - len(asked.tokens)
        if output > params.min_tokens and tokens[-1] in (
            *params.eos_token_ids,
            *params.stop_token_ids,
        ):
            return tokens[len(asked.tokens) :], "stop"
        if output >= params.max_tokens:
            return tokens[len(asked.tokens) :], "length"


@dataclass
class Setting:
    """One random configuration: scheduler, device and gates."""

    rng: random.Random
    core: EngineCore
    device: ToyDevice
    pool: BlockPool
    gate: OneAdapterGate
    late: LateGate
    witness: WitnessGate
    holding: HoldingGate
    loading: LoadingGate
    faulty: bool
    pooling: float  # the share of requests that generate nothing
    checkpoints: CheckpointGate | None = None
    arrivals: list[EngineRequest] = field(default_factory=list)

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler


def draw_groups(rng: random.Random) -> list[CacheGroup]:
    full = CacheSpec(1, 1, 1, "int8")
    windows = [WindowSpec(1, 1, 1, "int8", window=rng.choice([1, 3, 8, 20])) for _ in range(2)]
    kinds = rng.choice([[full], [full], [full, windows[0]], [windows[0]], [full, *windows]])
    return [CacheGroup(spec, (i,)) for i, spec in enumerate(kinds)]


def draw_checkpoints(rng: random.Random, size: int) -> CheckpointGate:
    boundary = size * rng.choice([1, 1, 2, 3])
    interval = boundary * rng.choice([0, 0, 1, 2])
    pool = CheckpointPool(rng.choice([1, 2, 5, 50]))
    return CheckpointGate(pool, size, boundary, interval, rng.random() < 0.8)


def draw_setting(seed: int) -> Setting:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    drafts = rng.choice([0, 0, 1, 3])
    depth = rng.choice([1, 2, 3, 4])
    groups = draw_groups(rng)
    cross = random.Random(~seed ^ 6).random() < 0.12
    by_priority = rng.random() < 0.5
    limits = SchedulerLimits(
        max_rows=rng.randint(1, 8),
        max_step_tokens=rng.randint(drafts + 1, 40),
        max_length=60,
        max_chunk=rng.choice([0, 0, 3, 9]),
        drafts=drafts,
        lookahead=drafts * (seed % 2),
        depth=depth,
        run_ahead=depth <= 2 or rng.random() < 0.5,
        by_priority=by_priority,
    )
    if rng.random() < 0.1:  # a prompt runs in one step or waits
        limits = SchedulerLimits(
            max_rows=4,
            max_step_tokens=64,
            max_length=60,
            chunked=False,
            drafts=drafts,
            depth=depth,
            by_priority=by_priority,
        )
    per_group = -(-(46 + (drafts + 1) * depth) // size) + 1 + (1 if size == 1 else 0)
    num_blocks = 1 + per_group * len(groups) + rng.choice([0, 1, 3, 40])
    if cross:
        groups.append(CacheGroup(CrossAttentionSpec(1, 1, 1, "int8", MOST_STATES), (len(groups),)))
        num_blocks += -(-MOST_STATES // size)
    pool = BlockPool(num_blocks, len(groups))
    gate, late = OneAdapterGate(), LateGate()
    witness = WitnessGate(late)
    own = random.Random(~seed ^ 2)  # as for `fair` below
    piece, holding = PieceGate(own.choice([3, 7, 99])), HoldingGate(own, own.choice([0, 0, 0.5, 1]))
    gates = [gate, late, witness, holding]
    if limits.chunked:
        gates += [FirstBiteGate(rng.choice([2, 5, 99])), piece]
    kv = KVManager(pool, groups, size, caching=rng.random() < 0.9, hasher=RememberingHasher(size))
    device = ToyDevice(groups, num_blocks, size, drafts, rng)
    states, checkpoints = random.Random(~seed ^ 3), None
    if states.random() < 0.5:
        device.add_states()
        if kv.caching and limits.chunked:
            checkpoints = draw_checkpoints(states, size)
            gates.insert(0, checkpoints)
            kv.limits = [checkpoints]
        else:
            kv.caching = False
    faulty = rng.random() < 0.15
    device.failing_steps = 0.02 if faulty and rng.random() < 0.5 else 0.0
    # Its own generator, so that older seeds keep their workloads.
    fair = random.Random(~seed).random() < 0.3
    waiting = FairQueue({"b": 3.0}) if fair else None
    device.right = random.Random(~seed ^ 4).choice([0.0, 0.6, 0.6, 1.0])
    device.fate = random.Random(~seed ^ 1)
    device.adding = device.fate.choice([0.0, 0.2, 0.7]) if depth == 1 else 0.0
    store = Store(random.Random(~seed ^ 5), device.kin)
    loading = LoadingGate(store, store.rng.choice([0, 0.5, 1, 1]))
    pool.listeners.append(store)
    device.failing_steps *= store.rng.choice([1, 5])
    if not cross and (
        device.states is None or kv.caching
    ):  # else nothing says where a state can continue
        gates.append(loading)
    scheduler = Scheduler(kv, limits, gates, clock=lambda: 0.0, waiting=waiting)
    core = EngineCore(scheduler, device, depth)
    witness.scheduler = piece.scheduler = holding.scheduler = store.scheduler = scheduler
    pooling = own.choice([0, 0, 0.3, 1])
    return Setting(
        rng, core, device, pool, gate, late, witness, holding, loading, faulty, pooling, checkpoints
    )


def draw_requests(s: Setting) -> None:
    rng, states = s.rng, 0
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    for i in range(rng.randint(1, 18)):
        prompt = shared[: rng.randint(0, 12)] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))
        ]
        if s.arrivals and rng.random() < 0.45:  # the same prompt twice: outputs share blocks too
            earlier = rng.choice(s.arrivals)
            prompt = list(earlier.tokens)
            if rng.random() < 0.2:  # another beginning, the same end
                prompt[rng.randrange(len(prompt))] = rng.randrange(VOCAB)
            elif rng.random() < 0.4:  # the next turn of a conversation: the answer is in the prompt
                answer = reference(earlier)[0] or [0]
                prompt = (prompt + answer[: rng.randint(1, len(answer))])[-27:]
                if prompt[0] != earlier.tokens[0]:
                    prompt = (earlier.tokens + answer)[: rng.randint(20, 27)]
        most = rng.randint(1, 18) if rng.random() < 0.5 else rng.randint(12, 18)
        params = SamplingParams(
            max_tokens=most,
            min_tokens=rng.choice([0, 0, rng.randint(0, most)]),
            eos_token_ids=rng.choice([[], [5, 11]]),
            stop_token_ids=rng.choice([[], [7]]),
            ignore_eos=rng.random() < 0.2,
            skip_reading_prefix_cache=rng.random() < 0.1,
        )
        if params.ignore_eos:
            params.eos_token_ids = []
        if s.scheduler.kv.max_encoder_len:
            states = random.Random(len(prompt) + i).randint(1, MOST_STATES)
        if s.pooling and random.Random(len(prompt) * i).random() < s.pooling:
            params = PoolingParams(skip_reading_prefix_cache=params.skip_reading_prefix_cache)
        asked = EngineRequest(
            str(i), prompt, params,
            priority=rng.randint(0, 2),
            adapter=rng.choice([None, None, "a", "bb"]),
            salt=rng.choice(["", "", "x"]),
            tenant="aab"[i % 3],
            num_encoder_tokens=states,
        )  # fmt: skip
        s.arrivals.append(asked)
        s.device.kin[asked.id] = (asked.adapter, asked.salt)
        if rng.random() < 0.2:
            s.late.ready_at[asked.id] = rng.randint(0, 60)
        if s.faulty and rng.random() < 0.2:
            s.device.faults[asked.id] = rng.randint(0, 6)


class Check:
    """Collects the outputs, and checks them at the end."""

    def __init__(self, s: Setting):
        self.s = s
        self.asked = {asked.id: asked for asked in s.arrivals}
        self.got: dict[str, list[int]] = {id: [] for id in self.asked}
        self.finish: dict[str, str] = {}
        self.fouled_at: dict[str, int] = {}  # errors: the last step planned when it was reported

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.id not in self.finish, f"{output.id} speaks after its end"
            self.got[output.id] += output.tokens
            if output.finish:
                self.finish[output.id] = output.finish
                asked = self.asked[output.id]
                pools = isinstance(asked.params, PoolingParams)
                if output.finish == "stop" and pools:
                    assert output.tensor == pooled(asked.tokens)
                    assert output.num_cached_tokens < len(asked.tokens)
                elif output.finish == "stop":
                    last = self.got[output.id][-1]
                    assert output.stopped_by == (
                        last if last in asked.params.stop_token_ids else None
                    )
                if output.finish == "error":
                    assert self.s.faulty, output.error
                    self.fouled_at[output.id] = self.s.scheduler.steps

    def done(self) -> None:
        for id, asked in self.asked.items():
            want, why = reference(asked)
            got = self.got[id]
            if self.finish[id] in ("abort", "error"):
                assert want[: len(got)] == got, f"request {id}: {got} is not how {want} begins"
            else:
                assert (got, self.finish[id]) == (want, why), f"request {id}: {got} != {want}"
        guilty = [at for id, at in self.fouled_at.items() if id in self.s.device.faults]
        if not self.s.device.failing_steps:
            for id, at in self.fouled_at.items():  # others fail only with a faulty one in flight
                if id not in self.s.device.faults:
                    entered = self.s.device.entered_at[id]
                    assert any(entered <= told for told in guilty), (
                        f"{id} read what was taken back ({at})"
                    )


def moves(s: Setting, check: Check) -> None:
    """One turn of the loop; asserts progress if there is work."""
    core, scheduler = s.core, s.scheduler
    planned, busy = scheduler.steps, bool(core.in_flight)
    check.take(core.receive(block=False))
    held = [(r, left, s.holding.blocks[r]) for r, left in s.holding.left.items()]
    check.take(core.step())
    for request, left, blocks in held:
        if s.holding.blocks.get(request) is blocks:  # else the request ran meanwhile
            assert s.holding.left[request] < left, "a gate that holds blocks back is not asked"
    assert not s.loading.sent.keys() & s.device.failed_steps, "a gate is not told of a failed step"
    for request in scheduler.waiting:
        for g, column in enumerate(request.blocks if request not in scheduler.held_blocks else ()):
            for block, hash in zip(
                column[: request.num_cached_blocks], request.hashes, strict=False
            ):
                right = block == NULL_BLOCK or s.pool.hash_of.get(block) == (g, hash)
                assert right, f"{request.id} waits with blocks whose content is wrong"
    stuck = not (busy or scheduler.steps > planned or scheduler.held_blocks)
    if stuck and (scheduler.running or any(s.late.ready(r) for r in scheduler.waiting)):
        raise AssertionError("there is work, and nothing moves")
    for request in scheduler.running:
        assert request.num_computed_tokens < request.limit + (not request.generates), (
            "works past the limit"
        )
        assert (
            scheduler.limits.run_ahead or request.num_pending_tokens <= 1 + scheduler.limits.drafts
        )
        held = sum(block != NULL_BLOCK for column in request.blocks for block in column)
        limits = scheduler.limits
        step = limits.max_tokens_in_flight + limits.lookahead
        most = scheduler.kv.max_blocks(request.limit, step, request.num_encoder_tokens)
        assert held <= most, f"{request.id} holds {held} blocks, and {most} are enough"


def published_blocks_hold_what_they_say(s: Setting) -> None:
    """Checks published blocks after all launched steps have run. It changes when steps run, so it is called rarely."""
    s.device.run_all()
    size, hasher = s.scheduler.kv.block_size, s.scheduler.kv.hasher
    for block, (group, hash) in s.pool.hash_of.items():
        found = [s.device.memory[block * size + offset] for offset in range(size)]
        if not s.faulty:
            assert [(f[0], f[1]) for f in found if f] == [
                (group, token) for token in hasher.tokens_of[hash]
            ], f"block {block} is published and holds something else"


def nap(s: Setting, rest: SleepController, check: Check) -> None:
    """Sleep and wake up: no step is in flight, and the blocks lose their content."""
    s.witness.awake = False
    rest.sleep(1)
    s.witness.awake = True
    check.take(s.core.outbox)
    s.core.outbox.clear()
    s.device.memory = [None] * len(s.device.memory)
    if s.device.states is not None:
        s.device.states.lose()
    rest.wake_up()


def trial(seed: int) -> int:
    """Number of preemptions in one random workload, checked."""
    return trial_of(seed)[0].scheduler.count.preemptions


def trial_of(seed: int) -> tuple[Setting, WitnessGate]:
    """Run and check one random workload."""
    s = draw_setting(seed)
    draw_requests(s)
    check, rng = Check(s), s.rng
    rest, naps = SleepController(s.core), random.Random(seed)
    to_come, spins = list(s.arrivals), 0
    while to_come or s.scheduler.has_work or s.core.in_flight:
        while to_come and rng.random() < 0.4:
            s.core.inbox.put(to_come.pop(0))
        if rng.random() < 0.01:
            s.core.inbox.put(Abort([rng.choice(s.arrivals).id]))
        if rng.random() < 0.005:
            s.scheduler.kv.reset()
        if naps.random() < 0.005:
            nap(s, rest, check)
        s.late.now += 1
        moves(s, check)
        if rng.random() < 0.1:
            published_blocks_hold_what_they_say(s)
        spins += 1
        assert spins < 20_000, "no progress"
    s.core.idle = False
    check.done()
    s.scheduler.check()
    assert len(s.pool.free) == s.pool.usable, "blocks leaked"
    assert not s.gate.active, "a gate was not told that everybody left"
    assert len(s.scheduler.free_rows) == s.scheduler.limits.max_rows, "rows leaked"
    if isinstance(s.scheduler.waiting, FairQueue):
        assert not s.scheduler.waiting.here, "the queue was not told that everybody left"
    assert not s.holding.left, "blocks are held back for ever"
    assert not s.loading.loads, "a gate was not told that a load is not needed"
    assert not s.pool.listeners[0].published.keys() ^ s.pool.hash_of.keys(), (
        "a listener missed something"
    )
    assert not s.late.prepared, "a gate was not told who gave up"
    assert not s.late.entered_early, "a gate said not ready, and it entered"
    return s, s.witness


def main(trials: int, first: int = 0) -> None:
    logging.disable(logging.CRITICAL)  # these workloads preempt, and fail steps, on purpose
    preemptions = 0
    for seed in range(first, first + trials):
        try:
            preemptions += trial(seed)
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
    print(f"{trials} workloads equal to the reference, {preemptions} preemptions")


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 1500,
        int(sys.argv[2]) if len(sys.argv) > 2 else 0,
    )
