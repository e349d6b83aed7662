"""LLM asleep and awake again: what becomes of requests that are here, that come, and of other threads."""

from __future__ import annotations

import threading
import time

import pytest

from quire.api.llm import LLM
from quire.errors import QuireError, ValidationError
from quire.protocol.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleeping(llm: LLM, mode: str):
    (before,) = llm.generate(["a"], GREEDY, use_tqdm=False)
    ids = llm.enqueue(["a", "b"], GREEDY)
    llm.sleep(mode=mode)
    assert llm.is_sleeping()
    with pytest.raises(QuireError, match=r"call wake_up\(\) first"):
        llm.generate(["c"], GREEDY, use_tqdm=False)
    if mode == "keep":
        with pytest.raises(QuireError, match="wake_up"):
            llm.wait_for_completion(ids, use_tqdm=False)
        assert llm.wake_up(["weights"]) is False
        assert llm.wake_up() is True
    first, _ = llm.wait_for_completion(ids, use_tqdm=False)
    assert first.outputs[0].finish_reason == ("abort" if mode == "abort" else "length")
    assert (first.outputs[0].token_ids == before.outputs[0].token_ids) == (mode != "abort")
    llm.wake_up()
    (after,) = llm.generate(["a"], GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.num_cached_tokens == 0


def test_threads_that_keep_generating_do_not_delay_sleep(llm: LLM):
    """A thread that generates again and again gets an error, and does not delay the thread that calls `sleep`."""
    told: list[str] = []

    def ask() -> None:
        try:
            while True:
                (one,) = llm.generate(["a"], GREEDY, use_tqdm=False)
                told.append(one.outputs[0].finish_reason or "")
        except QuireError as error:
            told.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while len(told) < 3:
        time.sleep(0.001)
    llm.sleep(mode="wait")
    thread.join(60)
    assert not thread.is_alive()
    assert set(told[:-1]) == {"length"}
    assert "call wake_up() first" in told[-1]


def test_sleep_can_release_only_the_kv_cache(llm: LLM):
    (before,) = llm.generate(["a"], GREEDY, use_tqdm=False)
    with pytest.raises(QuireError, match="pause it first"):
        llm.release_kv_cache_memory()
    ids = llm.enqueue(["a"], GREEDY)
    llm.sleep(level=0, mode="keep")
    llm.release_kv_cache_memory()
    assert llm.is_sleeping()
    assert llm.wake_up(["kv_cache"]) is True
    (after,) = llm.wait_for_completion(ids, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.num_cached_tokens == 0


def test_sleep_refuses_unknown_levels_and_tags(llm: LLM):
    for call in (lambda: llm.sleep(3), lambda: llm.sleep(mode="odd"), lambda: llm.wake_up(["odd"])):
        with pytest.raises(ValidationError):
            call()
    assert not llm.is_sleeping()
    assert llm.generate(["a"], GREEDY, use_tqdm=False)
