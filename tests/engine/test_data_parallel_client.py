"""DataParallelClient over clients of engines without processes: who gets a request, and what becomes of it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.parallel.parallel_config import ParallelConfig
from quire.engine.data_parallel import DataParallelClient
from quire.engine.data_parallel_calls import merge, merged_ready, merged_stats
from quire.engine.engine_state import Condition, EngineState
from quire.errors import EngineDeadError, EngineDelayed, QuireError, StartupError, ValidationError
from quire.protocol.output import EngineOutput, EngineReady, EngineStats
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

READY = EngineReady(64, 100, 16, 97, "float32", "cpu", "Toy", "native", 1, num_tokens=1600, max_num_seqs=4)  # fmt: skip
PARAMS = SamplingParams(max_tokens=2)


class ToyClient:
    """A ProcessClient whose engine is the test."""

    supervisor = None

    def __init__(self, engines: int = 2, first: int | None = None):
        parallel = ParallelConfig(
            data_parallel_size=engines, data_parallel_start_rank=first, data_parallel_size_local=engines
        )  # fmt: skip
        self.resolved: Any = SimpleNamespace(config=SimpleNamespace(parallel=parallel))
        self.condition: Condition = "ready"
        self.epoch, self.counted, self.error = 1, EngineStats(num_blocks=10), ""
        self.ready = READY
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: list[str] = []
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.said: queue.SimpleQueue[list[EngineOutput]] = queue.SimpleQueue()
        self.poison: set[str] = set()
        self.on_report: Callable[[], None] = lambda: None
        self.give_back: Any = None

    def state(self) -> EngineState:
        ready = READY if self.condition == "ready" else None
        return EngineState(self.epoch, self.condition, ready, self.error)

    def check(self) -> None:
        if self.condition in ("dead", "closed"):
            raise EngineDeadError("dead")
        if self.condition == "delayed":
            raise EngineDelayed("1234")

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        return self.ready

    def stats(self, fresh: bool = False) -> EngineStats:
        return self.counted

    def refuse_poison(self, request: EngineRequest) -> None:
        if request.id in self.poison:
            raise ValidationError("poison")

    def submit(self, request: EngineRequest) -> None:
        self.check()
        self.requests[request.id] = request

    def abort(self, ids: list[str], why: str = "abort") -> None:
        self.aborted += ids

    def ask(self, name: str, *args: Any) -> str:
        self.check()
        self.asked.append((name, *args))
        return name

    def answer_to(self, name: str) -> Any:
        if isinstance(answer := self.answers.get(name), Exception):
            raise answer
        return answer(*self.asked[-1][1:]) if callable(answer) else answer

    def call(self, name: str, *args: Any) -> Any:
        return self.answer_to(self.ask(name, *args))

    def unstarted(self) -> list[str]:
        return list(self.requests)

    def forget(self, id: str) -> EngineRequest | None:
        return self.requests.pop(id, None)

    def outputs(self) -> list[EngineOutput]:
        while self.condition not in ("dead", "closed"):
            try:
                return self.said.get(timeout=0.01)
            except queue.Empty:
                pass
        raise EngineDeadError("dead")

    def close(self) -> None:
        self.condition = "closed"

    # -- the test's side
    def reports(self, **stats: Any) -> None:
        self.counted = EngineStats(**stats)
        self.on_report()

    def ends(self, id: str) -> None:
        self.requests.pop(id, None)
        self.said.put([EngineOutput(id, [1], "stop")])


class Pair:
    def __init__(self, **options: Any) -> None:
        self.one, self.two = self.both = [ToyClient(**options), ToyClient(**options)]
        self.client = DataParallelClient(self.both)  # type: ignore[arg-type]
        self.client.wait_ready()

    def ask(self, *ids: str, to: int | None = None) -> None:
        for id in ids:
            self.client.submit(EngineRequest(id, [1], PARAMS, engine=to))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.client.close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def test_requests_are_dealt_out_and_outputs_name_their_engine(pair: Pair) -> None:
    pair.ask("a", "b", "c")
    assert (list(pair.one.requests), list(pair.two.requests)) == (["a", "c"], ["b"])
    pair.two.ends("b")
    [output] = pair.client.outputs()
    assert (output.id, output.engine) == ("b", 1)
    pair.ask("d")  # the second has none now
    assert list(pair.two.requests) == ["d"]


def test_a_named_engine_gets_the_request() -> None:
    pair = Pair(first=4)
    pair.ask("a", "b", to=5)
    assert list(pair.two.requests) == ["a", "b"]
    pair.client.close()


def test_aborts_go_to_the_engine_that_has_the_request(pair: Pair) -> None:
    pair.ask("a", "b")
    pair.client.abort(["b", "unknown", "a"])
    assert (pair.one.aborted, pair.two.aborted) == (["a"], ["b"])


def test_waiting_requests_of_a_dead_engine_go_to_the_others(pair: Pair) -> None:
    pair.ask("a", "b", "c")
    pair.client.abort(["c"])
    lost = [pair.one.requests.pop("a"), pair.one.requests.pop("c")]
    pair.one.condition = "restarting"
    last = EngineOutput("a", [5])
    pair.one.give_back([last], lost)
    assert list(pair.two.requests) == ["b", "a"]
    assert pair.client.outputs() == [last, EngineOutput("c", [], "abort")]
    assert pair.client.state().condition == "restarting"
    pair.client.check()  # it serves
    pair.ask("d")
    assert list(pair.two.requests) == ["b", "a", "d"]


def test_the_worst_state_shows_and_one_dead_engine_ends_nothing(pair: Pair) -> None:
    pair.one.condition = "delayed"
    assert pair.client.state().condition == "delayed"
    pair.one.condition = "dead"
    assert pair.client.state().condition == "delayed"
    pair.client.check()
    pair.ask("a")
    pair.two.ends("a")
    assert pair.client.outputs()[0].id == "a"
    pair.two.condition = "dead"
    assert pair.client.state().condition == "dead"
    for use in (pair.client.check, pair.client.outputs, lambda: pair.ask("b")):
        with pytest.raises(EngineDeadError):
            use()


def test_if_all_are_delayed_the_client_hears_it(pair: Pair) -> None:
    pair.one.condition = pair.two.condition = "delayed"
    with pytest.raises(EngineDelayed):
        pair.client.check()
    with pytest.raises(EngineDelayed):
        pair.ask("a")


def test_a_start_fails_with_the_number_of_the_engine() -> None:
    clients = [ToyClient(), ToyClient()]
    clients[1].condition, clients[1].error = "dead", "no weights"
    made = DataParallelClient(clients)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match="engine 1 of 2: no weights"):
        made.wait_ready()
    assert clients[0].condition == "closed"


def test_poison_of_one_engine_reaches_no_other(pair: Pair) -> None:
    pair.two.poison = {"a"}
    with pytest.raises(ValidationError):
        pair.ask("a")
    assert not pair.one.requests


def test_an_idle_engine_gets_requests_that_wait_elsewhere(pair: Pair) -> None:
    pair.ask("a", "b", "c", "d", to=0)
    for request in pair.one.requests.values():
        request.engine = None
    pair.one.answers["withdraw"] = lambda ids, count: ids[-count:]  # as the engine finds them
    pair.two.reports()
    pair.one.reports(running=1, waiting=3)
    until(lambda: list(pair.two.requests) == ["c", "d"])
    assert list(pair.one.requests) == ["a", "b"]
    pair.one.reports(running=1, waiting=1)
    pair.client.abort(["c"])
    assert pair.two.aborted == ["c"]


def test_every_engine_runs_a_call_and_the_answers_become_one(pair: Pair) -> None:
    pair.one.answers = {"collective_rpc": [1], "reset_prefix_cache": True, "count_ended": None}
    pair.two.answers = {"collective_rpc": [2], "reset_prefix_cache": False}
    assert pair.client.call("collective_rpc", "rank", [], {}) == [1, 2]
    assert pair.client.call("reset_prefix_cache") is False
    asked = len(pair.one.asked) + len(pair.two.asked)
    pair.client.call("count_ended", {"stop": 1})  # one engine counts it
    assert len(pair.one.asked) + len(pair.two.asked) == asked + 1
    pair.two.answers["reset_prefix_cache"] = QuireError("failed")
    with pytest.raises(QuireError, match="failed"):
        pair.client.call("reset_prefix_cache")
    pair.two.condition = "dead"
    assert pair.client.call("collective_rpc", "rank", [], {}) == [1]


def test_answers_of_named_functions() -> None:
    assert merge("wake_up", [["weights"], ["kv_cache", "weights"]]) == ["kv_cache", "weights"]
    assert merge("release_kv_cache", [None, "busy"]) == "busy"
    assert merge("is_sleeping", [False, True]) is True
    assert merge("drained", [True, False]) is False
    assert merge("hold", [2, 3]) == 5
    assert merge("list_loras", [["a"], ["a"]]) == ["a"]


def test_statistics_are_added() -> None:
    one = EngineStats(running=1, kv_usage=0.5, num_blocks=10, finished={"stop": 2}, histograms={"step_tokens": [1, 0, 3.0]})  # fmt: skip
    two = EngineStats(running=2, kv_usage=0.0, num_blocks=30, finished={"stop": 1, "abort": 1}, histograms={"step_tokens": [0, 2, 5.0]}, state="discard_all")  # fmt: skip
    both = merged_stats([one, two])
    assert (both.running, both.kv_usage, both.num_blocks, both.state) == (3, 0.125, 40, "discard_all")  # fmt: skip
    assert both.finished == {"stop": 3, "abort": 1}
    assert both.histograms == {"step_tokens": [1, 2, 8.0]}


def test_limits_are_those_of_the_smallest_engine() -> None:
    slow = EngineReady(32, 90, 16, 97, "float32", "cpu", "Toy", "native", 1, [("load", 9.0)], num_tokens=1440, max_num_seqs=8)  # fmt: skip
    both = merged_ready([READY, slow])
    assert (both.max_model_len, both.num_blocks, both.num_tokens, both.max_num_seqs) == (32, 90, 1440, 4)  # fmt: skip
    assert both.startup == [("load", 9.0)]
