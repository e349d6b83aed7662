"""EngineBalancer over simulated engines with a clock: nothing idles beside a queue, and nothing drifts."""

from __future__ import annotations

import random
from collections import deque

import pytest

from quire.engine.load_balancer import EngineBalancer, EngineLoad, Move
from quire.protocol.output import EngineStats

ROWS = 4
REPORT_EVERY = 3  # turns


class ToyEngine:
    """Runs up to ROWS requests; each turn makes a token of each. It reports every few turns, and when it gets idle."""

    def __init__(self) -> None:
        self.running: list[list[int]] = []  # [id, tokens left]
        self.waiting: deque[list[int]] = deque()
        self.tokens = 0
        self.stats = EngineStats()

    def turn(self, now: int) -> list[int]:
        """Ids of requests that end."""
        busy = bool(self.running or self.waiting)
        while self.waiting and len(self.running) < ROWS:
            self.running.append(self.waiting.popleft())
        for one in self.running:
            one[1] -= 1
            self.tokens += 1
        ended = [one[0] for one in self.running if not one[1]]
        self.running = [one for one in self.running if one[1]]
        if busy and (now % REPORT_EVERY == 0 or not (self.running or self.waiting)):
            full = len(self.running) / ROWS
            self.stats = EngineStats(
                running=len(self.running), waiting=len(self.waiting), kv_usage=full
            )
        return ended


class ToyFrontend:
    """Sends requests to toy engines as DataParallelClient does."""

    def __init__(self, engines: list[ToyEngine], fronts: int = 1):
        self.engines, self.balancer = engines, EngineBalancer(len(engines), fronts)
        self.own: list[set[int]] = [set() for _ in engines]

    def loads(self) -> list[EngineLoad]:
        return [
            EngineLoad(e.stats, len(own)) for e, own in zip(self.engines, self.own, strict=True)
        ]

    def send(self, id: int, tokens: int, to: int | None = None) -> None:
        all_of_them = range(len(self.engines))
        number = self.balancer.choose(self.loads(), all_of_them) if to is None else to
        self.balancer.sent(number, self.engines[number].stats)
        self.engines[number].waiting.append([id, tokens])
        self.own[number].add(id)

    def move(self) -> None:
        if (move := self.balancer.move(self.loads(), range(len(self.engines)))) is None:
            return
        self.balancer.moved(move, self.loads())
        waiting = self.engines[move.source].waiting
        mine = [one for one in waiting if one[0] in self.own[move.source]][: move.count]
        for one in mine:
            waiting.remove(one)
            self.own[move.source].discard(one[0])
            self.send(one[0], one[1])

    def ended(self, ids: list[int]) -> None:
        for own in self.own:
            own.difference_update(ids)


def run(
    engines: list[ToyEngine], fronts: list[ToyFrontend], arrivals: dict[int, list[int]], turns: int, moves: bool = True
) -> int:  # fmt: skip
    """Serve requests of these numbers of tokens that arrive in these turns. Returns the longest time in turns in which an engine
    was idle while requests waited in another."""
    idle, longest, id = [0] * len(engines), 0, 0
    for now in range(turns):
        for tokens in arrivals.get(now, ()):
            id += 1
            fronts[id % len(fronts)].send(id, tokens)
        for number, engine in enumerate(engines):
            queue = any(other.waiting for other in engines if other is not engine)
            idle[number] = 0 if engine.running or engine.waiting or not queue else idle[number] + 1
            longest = max(longest, idle[number])
        for engine in engines:
            ended = engine.turn(now)
            for front in fronts:
                front.ended(ended)
        for front in fronts if moves else ():
            front.move()
    assert not any(engine.running or engine.waiting for engine in engines)
    return longest


def lengths(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice((1, 4, 16, 150)) for _ in range(count)]


@pytest.mark.parametrize("fronts", [1, 3])
def test_no_engine_idles_beside_a_queue(fronts: int) -> None:
    """All arrive at once, so only requests that move can keep all engines busy to the end."""
    engines = [ToyEngine() for _ in range(3)]
    made = [ToyFrontend(engines, fronts) for _ in range(fronts)]
    longest = run(engines, made, {0: lengths(1000, 1)}, 20_000)
    assert longest <= 2 * REPORT_EVERY
    tokens = [engine.tokens for engine in engines]
    assert max(tokens) - min(tokens) < 0.1 * sum(tokens) / 3


def test_without_moves_an_engine_idles() -> None:
    """So the test above can fail."""
    engines = [ToyEngine() for _ in range(3)]
    assert run(engines, [ToyFrontend(engines)], {0: lengths(1000, 1)}, 20_000, moves=False) > 50


@pytest.mark.slow
def test_nothing_drifts_in_three_days() -> None:
    """A burst each hour, between long silences. After 72 hours the requests are still spread evenly."""
    engines = [ToyEngine(), ToyEngine()]
    fronts = [ToyFrontend(engines, 2), ToyFrontend(engines, 2)]
    hour = 1500
    arrivals = {hour * at: lengths(30, at) for at in range(72)}
    assert run(engines, fronts, arrivals, 72 * hour) <= 2 * REPORT_EVERY
    assert fronts[0].own == fronts[1].own == [set(), set()]
    before = [engine.tokens for engine in engines]
    run(engines, fronts, {0: lengths(1000, 99)}, 20_000)
    last = [engine.tokens - old for engine, old in zip(engines, before, strict=True)]
    for tokens in (before, last):
        assert abs(tokens[0] - tokens[1]) < 0.1 * sum(tokens) / 2


def test_equal_engines_take_turns() -> None:
    balancer, stats = EngineBalancer(3), EngineStats()
    loads = [EngineLoad(stats) for _ in range(3)]
    assert [balancer.choose(loads, range(3)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_requests_since_a_report_count_and_the_next_report_replaces_them() -> None:
    balancer, old = EngineBalancer(2, fronts=2), EngineStats(running=2)
    balancer.sent(0, old)
    balancer.sent(0, old)
    assert balancer.score(0, EngineLoad(old)) == 2 + 2 * 2
    assert balancer.score(0, EngineLoad(EngineStats(running=1))) == 1


def test_a_queue_beside_a_full_cache_weighs_more() -> None:
    balancer = EngineBalancer(2)
    full = EngineLoad(EngineStats(running=2, waiting=2, kv_usage=1.0))
    assert balancer.score(0, full) == 4 + 6 * 2 * 0.5
    busy = EngineLoad(EngineStats(running=8, kv_usage=0.4))
    assert balancer.choose([full, busy], (0, 1)) == 1


def test_requests_that_wait_for_something_else_do_not_move() -> None:
    balancer = EngineBalancer(2)
    held = EngineLoad(EngineStats(waiting=5, deferred=5), own=5)
    assert balancer.move([held, EngineLoad(EngineStats())], (0, 1)) is None
    queued = EngineLoad(EngineStats(running=1, waiting=5, deferred=1), own=6)
    found = balancer.move([queued, EngineLoad(EngineStats())], (0, 1))
    assert found is not None
    assert found == Move(0, 1, 3)
