"""The view of an engine: every block is told once, by who holds it."""

from __future__ import annotations

import random

from toy import ToyDevice

from quire.engine import view
from quire.engine.core import EngineCore
from quire.kvcache.manager import KVManager
from quire.kvcache.pool import BlockPool
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.params import SamplingParams
from quire.protocol.request import EngineRequest
from quire.scheduler.scheduler import Limits, Scheduler


def core_of(num_blocks: int) -> EngineCore:
    groups = [CacheGroup(CacheSpec(1, 1, 1, 1), (0,))]
    device = ToyDevice(groups, num_blocks + 1, 4, 0, random.Random(1))
    kv = KVManager(BlockPool(num_blocks + 1), groups, 4)
    core = EngineCore(
        Scheduler(kv, Limits(max_rows=2, max_step_tokens=64, max_length=200)), device, 1
    )
    for id in "abc":
        tokens = [number % 97 for number in range(9)]
        device.kin[id] = (None, "")
        core.inbox.put(EngineRequest(id, tokens, SamplingParams(max_tokens=20)))
    return core


def test_blocks_and_requests():
    core = core_of(40)
    for _ in range(3):
        core.turn()
    found = view.view(core)
    assert [(one["id"], one["state"], one["prompt"], one["limit"]) for one in found["requests"]] == [
        ("a", "decode", 9, 20), ("b", "decode", 9, 20), ("c", "waiting", 9, 20),
    ]  # fmt: skip
    assert found["requests"][0]["output"] > 0
    assert not any("tokens" in one for one in found["requests"])
    rows = {one["row"] for one in found["requests"]} - {-1}
    cells, pool = found["cells"], core.scheduler.kv.pool
    assert len(cells) == 40
    assert found["blocks_a_cell"] == 1
    for block, cell in enumerate(cells, 1):
        assert (cell in rows) == (pool.refs[block] == 1)
        assert (cell == view.SHARED) == (pool.refs[block] > 1)
        assert (cell == view.CACHED) == (pool.refs[block] == 0 and block in pool.hash_of)
    assert {*rows, view.FREE} <= set(cells)


def test_when_all_is_done_what_is_cached_is_seen():
    core = core_of(40)
    while core.scheduler.has_requests or not core.inbox.empty():
        core.turn()
    found = view.view(core)
    assert found["requests"] == []
    assert set(found["cells"]) == {view.FREE, view.CACHED}


def test_many_blocks_share_a_cell_and_none_is_lost(monkeypatch):
    monkeypatch.setattr(view, "CELLS", 16)
    core = core_of(40)
    core.turn()
    found = view.view(core)
    assert (len(found["cells"]), found["blocks_a_cell"]) == (14, 3)
    assert {one["row"] for one in found["requests"] if one["row"] >= 0} <= set(found["cells"])
