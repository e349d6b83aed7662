"""A gate and a hook that the core does not name: where a request stands, and blocks held back until they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts

from quire.engine.core import EngineCore
from quire.ops.cpu.bindings import best
from quire.protocol.plan import StepPlan
from quire.protocol.request import Abort, EngineRequest
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request
from quire.worker.hooks import Hook

NAME = "saved blocks"
PATHS = [
    pytest.param(True, marks=pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")),
    False,
]  # fmt: skip
DEPTHS = [1, 2, 3]
PIECE = 24


class SavingGate(Gate):
    """A request's blocks are free only when the hook has copied them; a plan computes tokens of one piece."""

    name = NAME

    def __init__(self) -> None:
        self.saving: dict[int, Request] = {}
        self.to_send: list[tuple[int, list[list[int]]]] = []
        self.done: set[Request] = set()
        self.starts: dict[str, list[int]] = {}
        self.most_held = 0

    def allow(self, request: Request, start: int, num_tokens: int) -> int:
        self.starts.setdefault(request.id, []).append(start)
        return min(num_tokens, PIECE - start % PIECE)

    def release(self, request: Request) -> bool:
        if request in self.done:
            self.done.discard(request)
            return True
        if request not in self.saving.values():
            number = len(self.saving) + 1000 * len(self.starts)
            self.saving[number] = request
            self.to_send.append((number, request.blocks))
        self.most_held = max(self.most_held, len(self.saving))
        return False

    def revoke(self, request: Request) -> None:
        self.saving = {n: r for n, r in self.saving.items() if r is not request}
        self.to_send = [(n, blocks) for n, blocks in self.to_send if n in self.saving]

    def data_for_hook(self, plan: StepPlan) -> bytes | None:
        sent, self.to_send = self.to_send, []
        return msgspec.msgpack.encode(sent) if sent else None

    def data_from_hook(self, extra: bytes) -> None:
        for number in msgspec.msgpack.decode(extra):
            if (request := self.saving.pop(number, None)) is not None:
                self.done.add(request)


class SavingHook(Hook):
    """Copies the blocks that the gate names, before the next step can write to them."""

    name = NAME

    def __init__(self, caches: list[tuple[torch.Tensor, ...]]) -> None:
        self.caches = caches
        self.saved: list[list[torch.Tensor]] = []
        self.numbers: list[int] = []

    def before(self, plan: StepPlan, *batch: Any) -> None:
        for number, blocks in msgspec.msgpack.decode(plan.extras.get(self.name, b"\x90")):
            self.saved.append([cache[0][blocks[0]].clone() for cache in self.caches])
            self.numbers.append(number)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return True

    def report(self) -> bytes | None:
        numbers, self.numbers = self.numbers, []
        return msgspec.msgpack.encode(numbers) if numbers else None


def plugged(one: Engine, fused: bool) -> tuple[SavingGate, SavingHook]:
    core = one.client.core
    worker = core.executor.worker
    caches = [layer.cache for layer in worker.model.modules() if hasattr(layer, "cache")]
    gate, hook = SavingGate(), SavingHook(caches)
    core.scheduler.gates.append(gate)
    worker.hooks.append(hook)
    core.check_each_step = True
    if not fused:
        worker.fast_step = None
    return gate, hook


def run_until_idle(core: EngineCore) -> None:
    for _ in range(50):
        if not (core.scheduler.has_work or core.in_flight):
            return
        core.turn()
    raise AssertionError("blocks are held back for ever")


@pytest.mark.parametrize("fused", PATHS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_gate_saves_blocks_before_they_are_freed(depth: int, fused: bool, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    given, params = prompts(12, longest=90), greedy(9)
    with engine(path, depth, dtype="bfloat16", max_num_seqs=3) as one:
        wanted = one.tokens(given, params)
    with engine(path, depth, dtype="bfloat16", max_num_seqs=3) as one:
        gate, hook = plugged(one, fused)
        scheduler = one.client.core.scheduler
        assert one.tokens(given, params) == wanted
        run_until_idle(one.client.core)  # the last save needs a plan without work
        assert (len(hook.saved), gate.saving, gate.done) == (len(given), {}, set())
        assert scheduler.kv.usage == 0
        scheduler.check()
        starts = gate.starts["0"]
        assert starts[0] == 0
        assert set(range(0, len(given[0]), PIECE)) <= set(starts)
        again = one.tokens(given, params)
        assert again == wanted
        assert any(gate.starts[str(number)][0] > 0 for number in range(12, 24)), "no cached tokens"


@pytest.mark.parametrize("fused", PATHS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_preempted_and_aborted_requests_leave_their_blocks_to_the_gate(
    depth: int, fused: bool, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    given, params = prompts(8, longest=90), greedy(40)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 6, "block_size": 16}
    with engine(path, depth, **settings) as one:
        wanted = one.tokens(given, params)
        needed = one.stats()["num_blocks"]
    with engine(path, depth, num_gpu_blocks_override=20, **settings) as one:
        gate, hook = plugged(one, fused)
        core = one.client.core
        assert one.tokens(given, params) == wanted
        assert needed > 20
        assert core.scheduler.count.preemptions
        assert len(hook.saved) >= len(given)
        one.client.submit(EngineRequest("gone", given[0], params))
        one.client.outputs()
        core.inbox.put(Abort(["gone"]))
        one.client.outputs()
        held = core.scheduler.held_blocks
        assert held.num_blocks
        core.scheduler.check()
        one.client.call("reset_prefix_cache", True)  # takes blocks at once, whoever holds them
        assert (len(held), core.scheduler.kv.usage) == (0, 0)
        assert not gate.saving
        run_until_idle(core)
        core.scheduler.check()
