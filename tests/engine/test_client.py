"""InlineClient on the toy device: outputs, calls from other threads, interrupts, engine death."""

from __future__ import annotations

import random
import signal
import threading
from dataclasses import replace

import pytest
from toy_device import ToyDevice, next_token
from workload import reference

from quire.config.engine import EngineConfig, Resolved
from quire.engine import rpc, sleep
from quire.engine.client import InlineClient, interrupts_deferred
from quire.engine.core import EngineCore
from quire.errors import EngineDeadError, QuireError, ValidationError
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.output import EngineOutput, EngineReady
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.gate import Gate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler


class Device(ToyDevice):
    def call(self, name, *args):
        return [[name, *args]]


def make(device: type[ToyDevice] = Device) -> InlineClient:
    groups = [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))]
    toy = device(groups, 101, 4, 0, random.Random(1))
    limits = SchedulerLimits(max_rows=4, max_step_tokens=16, max_length=60)
    core = EngineCore(Scheduler(KVManager(BlockPool(101), groups, 4), limits), toy, 1)
    core.functions.update(rpc.control_calls(core))
    resolved = Resolved(
        config=EngineConfig(), path="", hf_config={}, architecture="Toy", dtype="float32",
        device="cpu", max_model_len=60, auto_max_model_len=False, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=16, chunked_prefill=True, prefix_caching=True, depth=1, executor="uni",
    )  # fmt: skip
    ready = EngineReady(60, 100, 4, 97, "float32", "cpu", "Toy", "native", 1)
    return InlineClient(core, resolved, ready)


def ask(client: InlineClient, id: str, max_tokens: int = 5, arrived: float = 0.0) -> EngineRequest:
    request = EngineRequest(id, [1, 2, 3], SamplingParams(max_tokens=max_tokens), arrived=arrived)
    client.core.executor.kin[id] = (None, "")
    client.submit(request)
    return request


def collect(client: InlineClient, ids: set[str]) -> dict[str, list[EngineOutput]]:
    got: dict[str, list[EngineOutput]] = {id: [] for id in ids}
    while not all(outputs and outputs[-1].finish for outputs in got.values()):
        for output in client.outputs():
            got[output.id].append(output)
    return got


def test_outputs_come_until_every_request_has_ended() -> None:
    client = make()
    asked = [ask(client, str(i), i + 1) for i in range(7)]
    got = collect(client, {request.id for request in asked})
    for request in asked:
        assert [t for output in got[request.id] for t in output.tokens] == reference(request)[0]


def test_a_request_that_cannot_reach_the_workers_is_refused() -> None:
    """Regression: the plan could not be encoded, which ended the engine."""
    client = make()
    params = SamplingParams(stop=["\ud800"])
    client.submit(EngineRequest("inline", [1], params))
    client.resolved = replace(client.resolved, executor="mp")
    with pytest.raises(ValidationError, match="cannot be sent to the engine's process"):
        client.submit(EngineRequest("ranks", [1], params))


def test_clients_have_the_common_interface() -> None:
    client = make()
    assert client.wait_ready() is client.ready
    assert (client.epoch, client.state().condition, client.state().ready) == (
        0,
        "ready",
        client.ready,
    )
    request = ask(client, "a")
    collect(client, {request.id})
    assert client.stats().generation_tokens == client.stats(fresh=True).generation_tokens == 5
    client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.check()
    assert client.state().condition == "dead"
    assert client.stats().generation_tokens == 5


def test_a_caller_that_waits_for_a_drain_hears_that_the_engine_died() -> None:
    class Dying(Device):
        def result(self, step):
            if step == 4:
                raise MemoryError
            return super().result(step)

    client = make(Dying)
    client.core.functions |= sleep.control_calls(client.core)
    ask(client, "long", 30)
    assert client.call("hold", "wait") == 1
    errors: list[Exception] = []

    def wait() -> None:
        try:
            client.call("drained")
        except Exception as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not client.core.pending_calls:
        waiting.join(0.01)
    with pytest.raises(EngineDeadError, match="MemoryError"):
        collect(client, {"long"})
    waiting.join(60)
    assert [type(error) for error in errors] == [EngineDeadError]


def test_a_refusal_is_an_output_that_names_the_limits() -> None:
    client = make()
    ask(client, "long", max_tokens=58)
    [refused] = client.outputs()
    assert (refused.finish, refused.error_kind) == ("error", "invalid")
    assert "3 tokens and max_tokens is 58" in (refused.error or "")


def test_a_reset_can_preempt_running_requests() -> None:
    def tokens(reset: bool) -> list[int]:
        client = make()
        ask(client, "one", 12)
        found = [token for output in client.outputs() for token in output.tokens]
        if reset:
            assert client.call("reset_prefix_cache") is False
            assert client.call("reset_prefix_cache", True) is True
            assert client.call("stats")["kv_usage"] == 0
        return found + [
            token for output in collect(client, {"one"})["one"] for token in output.tokens
        ]

    assert tokens(reset=True) == tokens(reset=False)


def test_calls_are_answered_without_a_running_step() -> None:
    client = make()
    assert client.call("reset_prefix_cache") is True
    assert client.call("stats")["num_blocks"] == 100
    assert client.call("collective_rpc", "echo", [1], {"a": 2}) == [
        ["collective_rpc", "echo", [1], {"a": 2}]
    ]
    with pytest.raises(QuireError, match="no function 'dance'"):
        client.call("dance")


def test_calls_are_answered_while_another_thread_waits_for_outputs() -> None:
    client = make()
    seen: list[EngineOutput] = []

    def read() -> None:
        while True:
            seen.extend(client.outputs())

    def read_to_the_end() -> None:
        with pytest.raises(EngineDeadError, match="shut down"):
            read()
        seen.append(EngineOutput("", []))  # marks that the exception was raised here

    reader = threading.Thread(target=read_to_the_end)
    reader.start()
    ask(client, "a")
    stats = [client.call("stats") for _ in range(20)]
    assert all(s["num_blocks"] == 100 for s in stats)
    while not (seen and seen[-1].finish):
        pass
    client.close()
    reader.join(60)
    assert not reader.is_alive()
    assert seen.pop().id == ""
    assert seen[0].tokens == [next_token([1, 2, 3], None)]


class Dying(Device):
    def result(self, step):
        raise MemoryError("no memory left on the toy")


def test_an_engine_error_ends_all_requests() -> None:
    client = make(Dying)
    ask(client, "a")
    with pytest.raises(EngineDeadError, match="no memory left on the toy"):
        client.outputs()
    for use in (client.outputs, lambda: client.submit(None), lambda: client.call("stats")):
        with pytest.raises(EngineDeadError, match="no memory left"):
            use()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_end_of_the_step() -> None:
    done = []

    def step(interrupts: int) -> None:
        with interrupts_deferred():
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)
            done.append(interrupts)

    for interrupts in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            step(interrupts)
    assert done == [1]  # the second interrupt does not wait


class Interrupted(Device):
    def result(self, step):
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return super().result(step)


@pytest.mark.usefixtures("interruptible")
def test_a_generation_continues_after_an_interrupt() -> None:
    client = make(Interrupted)
    request = ask(client, "a")
    got: list[int] = []
    finished, interrupts = False, 0
    while not finished:
        try:
            for output in client.outputs():
                got += output.tokens
                finished = output.finish is not None
        except KeyboardInterrupt:
            interrupts += 1
    assert (got, interrupts) == (reference(request)[0], 1)


def test_a_corrupted_block_pool_is_detected_in_the_same_step():
    for each_step, runs_on in ((False, True), (True, False)):
        client = make()
        client.core.check_each_step = each_step
        ask(client, "a")
        assert client.outputs()
        pool = client.core.scheduler.kv.pool
        block = pool.free[-1] if isinstance(pool.free, list) else next(iter(pool.free))
        pool.refs[block] += 1  # a used block that is still in the free list
        if runs_on:
            assert client.outputs()
        else:
            with pytest.raises(EngineDeadError, match="block pool"):
                client.outputs()


def test_requests_of_a_disconnected_client_are_aborted() -> None:
    client = make()
    gone = [ask(client, f"gone-{number}", 40) for number in range(6)]  # some run, some wait
    for request in gone:
        request.client = 1
    ask(client, "mine", 40)
    client.outputs()
    assert client.call("stats")["running"] == 4
    assert client.call("abort_client", 1) == 6
    assert client.call("abort_client", 1) == 0
    [last] = collect(client, {"mine"})["mine"][-1:]
    assert last.finish == "length"
    stats = client.call("stats")
    assert (stats["running"], stats["waiting"], stats["kv_usage"]) == (0, 0, 0)
    assert stats["finished"] == {
        "stop": 0, "length": 1, "abort": 6, "error": 0, "repetition": 0,
    }  # fmt: skip


def test_a_request_of_an_older_arrival_time_is_admitted_first() -> None:
    """The next step of a beam search does not queue after everything that came during its last one."""
    client = make()
    for number in range(12):
        ask(client, f"{number}", 20, arrived=10.0 + number)
    client.outputs()  # four rows run
    ask(client, "step of an older search", 1, arrived=5.0)
    ended: list[str] = []
    while len(ended) < 13:
        ended += [output.id for output in client.outputs() if output.finish]
    assert ended[:5] == ["0", "1", "2", "3", "step of an older search"]
    assert client.call("stats")["preemptions"] == 0


def test_requests_waiting_for_a_gate_are_counted_separately() -> None:
    class Shut(Gate):
        def ready(self, request: Request) -> bool:
            return request.id != "held"

    client = make()
    client.core.scheduler.gates.append(Shut())
    for number in range(5):
        ask(client, f"{number}", 40)
    ask(client, "held")
    client.outputs()
    stats = client.call("stats")
    assert (stats["running"], stats["waiting"], stats["deferred"]) == (4, 2, 1)


def test_statistics_do_not_change_the_state_of_gates() -> None:
    class Prepares(Gate):
        def ready(self, request: Request) -> bool:
            asked.append(request.id)
            return False

        def is_blocking(self, request: Request) -> bool:
            return request.id in asked

    asked: list[str] = []
    client = make()
    client.core.scheduler.gates.append(Prepares())
    ask(client, "a")
    assert client.call("stats")["deferred"] == 0
    assert not asked
    client.core.scheduler.plan()
    before = list(asked)
    assert client.call("stats")["deferred"] == 1
    assert asked == before == ["a"] * len(before)


def test_a_gate_without_ready_requests_does_not_spin() -> None:
    class Silent(Gate):
        open = False

        def ready(self, request: Request) -> bool:
            return self.open

    client, gate = make(), Silent()
    client.core.scheduler.gates.append(gate)
    request = ask(client, "held")
    threading.Timer(0.1, lambda: setattr(gate, "open", True)).start()
    got = collect(client, {"held"})["held"]
    assert [t for output in got for t in output.tokens] == reference(request)[0]


def test_requests_received_during_a_call_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the loop went idle with the new request, since no other message came."""
    monkeypatch.setattr("quire.engine.core.LOOK_AGAIN_S", 3600.0)
    client = make()
    assert client.core.step() == []
    assert client.core.idle
    request = ask(client, "a")
    assert client.call("stats")["waiting"] == 1
    got = collect(client, {"a"})["a"]
    assert [t for output in got for t in output.tokens] == reference(request)[0]


def test_an_engine_error_during_a_call_ends_the_engine() -> None:
    """Regression: the function's caller got the error, and the requests of that step waited forever."""

    class DyingOnce(Device):
        def result(self, step):
            if step == 1:
                raise MemoryError("no memory left on the toy")
            return super().result(step)

    client = make(DyingOnce)
    core = client.core
    core.depth = 2
    core.functions["settle"] = core.settle
    ask(client, "a")
    core.receive(block=False)
    assert core.step() == []
    assert core.in_flight
    with pytest.raises(QuireError, match="no memory left on the toy"):
        client.call("settle")
    with pytest.raises(EngineDeadError, match="no memory left on the toy"):
        client.outputs()
