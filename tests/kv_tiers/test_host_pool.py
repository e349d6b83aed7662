"""Which slots of host memory have blocks, and which may be taken."""

from __future__ import annotations

from quire.kvstore.host_pool import HostPool

A, B, C = (0, b"a"), (0, b"b"), (1, b"a")


def add(pool: HostPool, key: tuple[int, bytes]) -> int:
    slot = pool.take()
    assert slot is not None
    pool.add(key, slot)
    return slot


def test_the_least_recently_used_block_without_a_pin_makes_room() -> None:
    pool = HostPool(range(5, 7))
    pool.pin(A)  # before it is here
    first, second = add(pool, A), add(pool, B)
    assert {first, second} == {5, 6}
    assert (pool.slot(A), pool.usage) == (first, 0.5)
    assert add(pool, C) == second
    assert B not in pool
    pool.pin(C)
    assert pool.take() is None
    pool.unpin(A)
    pool.unpin(C)
    pool.pin(A)  # used again, so C is the older one
    pool.unpin(A)
    assert add(pool, B) == second
    assert (A in pool, C in pool, len(pool), pool.usage) == (True, False, 2, 0.0)


def test_a_block_has_as_many_pins_as_it_was_pinned() -> None:
    pool = HostPool(range(1))
    pool.pin(A)
    pool.pin(A)
    add(pool, A)
    pool.unpin(A)
    assert pool.take() is None
    pool.unpin(A)
    assert pool.take() == 0


def test_a_block_that_comes_twice_needs_one_slot() -> None:
    pool = HostPool(range(2))
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    pool.add(A, first)
    pool.add(A, second)
    assert pool.take() == second
    assert A in pool


def test_slots_that_may_still_be_read_are_free_after_their_last_pin() -> None:
    pool = HostPool(range(2))
    pool.pin(A)
    read, other = add(pool, A), add(pool, B)
    pool.clear()
    assert (len(pool), A in pool) == (0, False)
    assert (pool.take(), pool.take()) == (other, None)
    pool.unpin(A)
    assert pool.take() == read
