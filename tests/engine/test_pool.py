"""The order of free blocks: those without a hash before cached ones."""

from __future__ import annotations

from quire.kvcache.block_pool import BlockPool


def test_blocks_without_a_hash_are_reused_first():
    pool = BlockPool(8)
    first = [pool.allocate() for _ in range(4)]
    assert first == [1, 2, 3, 4]
    pool.publish(0, 2, b"two")
    pool.publish(0, 3, b"three")
    pool.release([1, 2, 3, 4])
    assert [pool.allocate() for _ in range(2)] == [4, 1]
    assert [pool.allocate() for _ in range(3)] == [5, 6, 7]  # never used, before what is cached
    assert pool.find(0, b"two") == 2
    assert [pool.allocate() for _ in range(2)] == [2, 3]  # least recently freed first
    assert pool.find(0, b"two") is None
    pool.release(range(1, 8))
    pool.check()
