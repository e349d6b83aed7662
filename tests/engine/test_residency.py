"""Residency statistics of blocks, against hand-kept records."""

from __future__ import annotations

import random

from quire.kvcache.block_metrics import ObservedBlockPool
from quire.kvcache.block_pool import BlockPool
from quire.observe.prometheus import ServerMetrics
from quire.protocol.bucket_counts import BucketCounts
from quire.protocol.output import EngineStats

BOUNDS = (1.0, 10.0, 100.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pool_of(num_blocks: int, clock: Clock, share: float = 1.0) -> ObservedBlockPool:
    return ObservedBlockPool(num_blocks, 1, BOUNDS, share, clock)


def test_one_block_from_allocation_to_reuse():
    clock = Clock()
    pool = pool_of(2, clock)
    block = pool.allocate()
    pool.publish(0, block, b"what")
    clock.now = 5
    pool.release([block])
    clock.now = 8  # 3 without a user
    pool.share(block)
    pool.share(block)  # in use already: no gap
    clock.now = 20
    pool.release([block, block])
    clock.now = 250
    assert pool.allocate() == block  # lived 250, without a user for the last 230
    assert pool.stats() == {
        "lifetime": [0, 0, 0, 1, 250],
        "idle": [0, 0, 0, 1, 230],
        "gap": [0, 1, 0, 0, 3],
    }


def test_unpublished_blocks_are_not_counted():
    pool = pool_of(2, Clock())
    pool.release([pool.allocate()])
    pool.allocate()
    assert all(not any(told) for told in pool.stats().values())
    assert BlockPool(2).stats() == {}


def test_an_observed_pool_equals_a_plain_pool():
    """Random calls to both pools; the sampled share of blocks is about the configured one."""
    draw, clock = random.Random(7), Clock()
    pools = (BlockPool(40), pool_of(40, clock, share=0.25))
    mine: list[int] = []
    taken = 0
    for step in range(3000):
        clock.now = step
        if mine and (draw.random() < 0.5 or not pools[0].free):
            block = mine.pop(draw.randrange(len(mine)))
            for pool in pools:
                pool.release([block])
        elif pools[0].hash_of and draw.random() < 0.4:
            block = draw.choice(sorted(pools[0].hash_of))
            for pool in pools:
                pool.share(block)
            mine.append(block)
        else:
            found = {pool.allocate() for pool in pools}
            assert len(found) == 1
            taken += 1
            mine += found
            for pool in pools:
                pool.publish(0, mine[-1], step.to_bytes(4, "big"))
        assert pools[0].free == pools[1].free
    for pool in pools:
        pool.check()
    counted = sum(pools[1].stats()["lifetime"][:-1])
    assert 0.15 * taken < counted < 0.35 * taken
    assert counted == sum(pools[1].stats()["idle"][:-1])


def test_residency_is_exported_as_histograms():
    counted = BucketCounts(BOUNDS)
    for value in (0.5, 1.0, 50.0, 1000.0):
        counted.add(value)
    metrics = ServerMetrics("toy", custom={"kv_cache_residency": list(BOUNDS)})
    metrics.attach(lambda: EngineStats(histograms={"lifetime": counted.stats}), 10, {})
    text = metrics.render().decode()
    name, labels = "vllm:kv_block_lifetime_seconds", 'engine="0"'
    for bound, count in (("1.0", 2), ("10.0", 2), ("100.0", 3), ("+Inf", 4)):
        assert f'{name}_bucket{{{labels},le="{bound}",model_name="toy"}} {count}.0' in text
    assert f'{name}_sum{{{labels},model_name="toy"}} 1051.5' in text
    assert f'{name}_count{{{labels},model_name="toy"}} 4.0' in text
    assert "kv_block_reuse_gap" not in text
