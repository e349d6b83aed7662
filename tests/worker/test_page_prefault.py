"""Pages of the cache are there before a step writes to them, and no more of them than it may take."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref

import pytest
import torch

from quire.platforms import memory
from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.page_prefault import KVPagePrefaulter

BLOCKS, EACH = 1000, 64 << 10  # 62 MiB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")


def fresh() -> torch.Tensor:
    """A mapping of our own: what an allocator hands out may have been used before."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, BLOCKS * EACH, flags=private), dtype=torch.uint8)


def resident(tensor: torch.Tensor, start: int, end: int) -> float:
    """The share of a range of bytes whose pages are there."""
    first = -(-(tensor.data_ptr() + start) // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + end - first) // mmap.PAGESIZE
    told = (ctypes.c_ubyte * count)()
    if ctypes.CDLL(None).mincore(
        ctypes.c_void_p(first), ctypes.c_size_t(count * mmap.PAGESIZE), told
    ):
        pytest.skip("mincore is not there")
    return sum(told) / count


def until(tensor: torch.Tensor, block: int) -> None:
    for _ in range(6000):  # a thread of low priority, on a machine that may be busy
        if resident(tensor, 0, block * EACH) == 1:
            return
        time.sleep(0.01)
    pytest.fail(f"pages of the first {block} blocks never came")


def plan(*blocks: int, more: int = 0) -> StepPlan:
    params = SamplingParams(max_tokens=1)
    entered = [EnteredRow(0, "a", [1], 1, 0, [list(blocks)], params)] if blocks else []
    return StepPlan(1, entered, [WorkItem(0, 1, [[more]] if more else [])], [])


def begun(tensor: torch.Tensor, step: int) -> KVPagePrefaulter:
    hook = KVPagePrefaulter(BLOCKS, step)
    hook.begin([(tensor,)])
    return hook


def test_pages_come_before_the_blocks_are_used():
    tensor = fresh()
    step = 40
    hook = begun(tensor, step)
    until(tensor, step)
    assert resident(tensor, 400 * EACH, BLOCKS * EACH) < 0.1  # what nobody is near stays away
    hook.before(plan(0, 1, 5), None)
    assert hook.prefaulted == step + 1  # still far ahead
    hook.before(plan(0, 1, 300), None)
    until(tensor, 340)
    assert hook.prefaulted == 341
    hook.before(plan(more=BLOCKS - 1), None)
    until(tensor, BLOCKS)
    hook.before(plan(more=3), None)
    assert hook.prefaulted == BLOCKS


def test_prefaulting_keeps_written_data():
    tensor = fresh()
    tensor[::EACH] = 7
    hook = begun(tensor, BLOCKS)
    hook.before(plan(more=BLOCKS - 1), None)
    until(tensor, BLOCKS)
    assert tensor[::EACH].eq(7).all()
    assert int(tensor.count_nonzero()) == BLOCKS


def test_prefaulting_without_a_cache_does_nothing():
    hook = KVPagePrefaulter(1, 8)
    hook.begin([])
    hook.before(plan(0, 1), None)


def test_a_new_cache_restarts_prefaulting_and_frees_the_old():
    first, second = fresh(), fresh()
    hook = begun(first, 40)
    until(first, 40)
    hook.begin([])
    hook.before(plan(0, 1, 300), None)
    assert not hook.parts
    hook.begin([(second,)])
    until(second, 40)
    assert resident(first, 400 * EACH, BLOCKS * EACH) < 0.1


def test_an_older_kernel_does_not_keep_a_cache_that_sleep_drops(monkeypatch: pytest.MonkeyPatch):
    tried = threading.Event()

    def refused(start: int, end: int) -> None:
        tried.set()
        raise OSError

    monkeypatch.setattr(memory, "prefault", refused)
    tensor = fresh()
    hook, cache = begun(tensor, 40), weakref.ref(tensor)
    assert tried.wait(60)
    hook.before(plan(0, 1, 300), None)
    hook.begin([])
    del tensor
    for _ in range(1000):
        if cache() is None:
            return
        time.sleep(0.01)
    pytest.fail("the cache is still there")


def test_a_hook_that_is_gone_leaves_neither_its_thread_nor_the_cache():
    before, tensor = set(threading.enumerate()), fresh()
    hook, cache = begun(tensor, 40), weakref.ref(tensor)
    (thread,) = set(threading.enumerate()) - before
    until(tensor, 40)
    del hook, tensor
    thread.join(60)
    assert not thread.is_alive()
    assert cache() is None
