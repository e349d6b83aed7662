"""The exchange between machines by gloo; the rendezvous through which its ranks find each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from quire.errors import RankLost
from quire.executor.control_port import ControlPort
from quire.parallel.gloo import GlooGroup
from quire.parallel.multi_node import Machines

SHAPES = [(1, 1), (3, 40), (700, 129), (0, 8), *[(1, 7)] * 20]


def part(rank: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(rows * width).view(rows, width) + 1000 * rank).to(dtype)


def on_machines(size: int, run: Callable[[GlooGroup], Any]) -> list[Any]:
    """What each rank's call gives. Each has an address of its own, as on a machine of its own."""
    port = ControlPort("127.0.0.1", 0, b"", {}, {})

    def one(rank: int) -> Any:
        meeting = port.host, port.port
        machines = Machines(list(range(size)), f"127.0.0.{rank + 1}", meeting, port.rendezvous_key)
        assert machines.spans([0, 1])
        assert machines.place(rank) == (0, 1)
        return run(machines.group(machines.meet(), "all", list(range(size)), rank))

    try:
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(one, range(size)))
    finally:
        port.close(ended=True)


def exchange(ranks: GlooGroup) -> list[Any]:
    wrong = []
    for rows, width in SHAPES:
        for dtype in (torch.bfloat16, torch.float32, torch.uint8):
            got = ranks.gather(part(ranks.rank, rows, width, dtype))
            parts = [part(rank, rows, width, dtype) for rank in range(ranks.size)]
            if not torch.equal(got, torch.cat(parts, -1)):
                wrong.append((rows, width, dtype))
    least = ranks.least([ranks.rank, -ranks.rank, 5])
    return wrong if least == [0, 1 - ranks.size, 5] else [least]


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_all_parts(size: int) -> None:
    assert on_machines(size, exchange) == [[]] * size


def test_a_rank_that_does_not_come_ends_the_exchange() -> None:
    def run(ranks: GlooGroup) -> str:
        if ranks.rank == 1:
            return ""
        ranks.limit(0.3)
        with pytest.raises(RankLost, match=r"rank 0 of 2 .*exchange of 8 bytes"):
            ranks.gather(torch.zeros(1, 2))
        return "lost"

    assert on_machines(2, run) == ["lost", ""]


def test_a_rank_may_load_for_longer_than_an_exchange() -> None:
    def run(ranks: GlooGroup) -> list[int]:
        ranks.limit(0.3)
        if ranks.rank == 1:
            time.sleep(1.0)
        found = ranks.least([3 - ranks.rank])
        if ranks.rank == 0:
            with pytest.raises(RankLost, match=r"\(limit 0\.3 s\)"):
                ranks.gather(torch.zeros(1, 2))
        return found

    assert on_machines(2, run) == [[2], [2]]


def test_an_exchange_that_ends_at_the_end_of_a_look_is_no_fault() -> None:
    class Exchange:
        def wait(self, timeout: Any = None) -> None:
            if timeout is not None:
                raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return True

    GlooGroup.__new__(GlooGroup)._wait(Exchange())


def test_an_address_of_no_interface_is_named() -> None:
    port = ControlPort("127.0.0.1", 0, b"", {}, {})
    machines = Machines([0, 1], "192.0.2.1", (port.host, port.port), port.rendezvous_key)
    with pytest.raises(RankLost, match=r"rank 0 of 2 at 192\.0\.2\.1 \(QUIRE_HOST_IP"):
        machines.group(machines.meet(), "all", [0, 1], 0)
    port.close(ended=True)


def test_a_rank_that_is_missing_at_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.parallel.multi_node.MEET_S", 0.3)
    port = ControlPort("127.0.0.1", 0, b"", {}, {})
    machines = Machines([0, 1], "127.0.0.1", (port.host, port.port), port.rendezvous_key)
    with pytest.raises(RankLost, match=r"rank 0 of 2 at 127\.0\.0\.1"):
        machines.group(machines.meet(), "all", [0, 1], 0)
    port.close(ended=True)
