"""A store that is slow, empty, wrong, late, full or gone changes no token, and leaks nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from equality.engines import engine, greedy
from kv_tiers.kept import (
    COMMON,
    SIZE,
    count,
    disk_of,
    fail_first_copies,
    gate_of,
    hits,
    kept,
    save_all,
    spoil,
)
from lora.adapters import run as run_adapters
from lora.adapters import write as write_adapter
from parallel.thread_engine import split_engine

from quire.features.kv_tiers import rates
from quire.kvstore.record import BadRecord
from quire.protocol.sampling_params import SamplingParams

PROMPTS = [[9, 8, 7] * 15 + [20 + n] * 30 for n in range(4)]
COUNT = 8


@pytest.fixture
def filled(checkpoint: Callable[..., str], tmp_path: Path) -> Path:
    with kept(checkpoint("qwen3"), tmp_path / "kv") as one:
        one.tokens(PROMPTS, greedy(COUNT))
    return tmp_path / "kv"


@pytest.fixture
def expected(checkpoint: Callable[..., str]) -> list[list[int]]:
    with engine(checkpoint("qwen3"), 2, **COMMON) as one:
        return one.tokens(PROMPTS, greedy(COUNT))


def slow(read: Any, *args: Any) -> None:
    time.sleep(0.01)
    read(*args)


def empty(read: Any, key: Any, length: int, record: memoryview) -> None:
    raise BadRecord("missing")


def fail(read: Any, key: Any, length: int, record: memoryview) -> None:
    raise RuntimeError("a fault of the program")


def sometimes(read: Any, key: Any, length: int, record: memoryview) -> None:
    if key[1][0] % 3 == 0:
        raise BadRecord("checksum")
    read(key, length, record)


FAULTS = {"slow": slow, "empty": empty, "wrong": sometimes, "broken": fail}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_store_with_faults(
    fault: str, depth: int, filled: Path, expected: list[list[int]], checkpoint: Callable[..., str]
) -> None:
    with kept(checkpoint("qwen3"), filled, depth) as one:
        store: Any = disk_of(one)
        read = store.read
        store.read = lambda *args: FAULTS[fault](read, *args)
        for _ in range(2):
            assert one.tokens(PROMPTS, greedy(COUNT)) == expected
            save_all(one)
            spoil(one)
        one.client.core.scheduler.check()
        assert gate_of(one).staging.num_free == gate_of(one).staging.num_slots
        if fault in ("empty", "broken"):
            assert hits(one) == 0


@pytest.mark.slow
def test_a_store_that_is_late(
    filled: Path, expected: list[list[int]], checkpoint: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(rates, "GRACE_S", 0.05)
    monkeypatch.setattr(rates, "PATIENCE", 0.0)
    with kept(checkpoint("qwen3"), filled) as one:
        store: Any = disk_of(one)
        read = store.read
        store.read = lambda *args: (time.sleep(0.4), read(*args))
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        assert count(one, "kv_load_failures:late") > 0
        store.read = read
        spoil(one)
        monkeypatch.setattr(rates, "GRACE_S", 30.0)
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        assert hits(one) > 0


def test_requests_that_end_while_they_load(
    filled: Path, expected: list[list[int]], checkpoint: Callable[..., str]
) -> None:
    with kept(checkpoint("qwen3"), filled) as one:
        store: Any = disk_of(one)
        read = store.read
        store.read = lambda *args: (time.sleep(0.02), read(*args))
        from quire.protocol.request import EngineRequest

        core = one.client.core
        for number in range(12):
            one.client.submit(EngineRequest(f"x{number}", PROMPTS[number % 4], greedy(COUNT)))
        for number in range(12):
            core.receive(block=False)
            core.step()
            one.client.abort([f"x{number}"])
        core.receive(block=False)
        while core.in_flight or core.scheduler.requests:
            core.step()
        store.read = read
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        save_all(one)
        core.scheduler.check()
        assert gate_of(one).staging.num_free == gate_of(one).staging.num_slots


@pytest.mark.slow
def test_few_slots_are_enough(
    filled: Path, expected: list[list[int]], checkpoint: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("quire.features.kv_tiers.feature.STAGING_BYTES", 1)
    with kept(checkpoint("qwen3"), filled) as one:
        assert gate_of(one).staging.num_slots == 4
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        assert hits(one) > 0


def test_second_use_writes_what_a_second_request_uses(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    with kept(checkpoint("qwen3"), tmp_path / "kv", kv_disk_write="second-use") as one:
        one.tokens(PROMPTS[:1], greedy(COUNT))
        save_all(one)
        store: Any = disk_of(one)
        assert not store.index
        one.tokens([[*PROMPTS[0][:45], 1, 2]], greedy(COUNT))
        save_all(one)
        assert len(store.index) == 45 // SIZE


def test_auto_writes_no_more_than_the_size_of_the_folder_a_day(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    settings = {"kv_disk_write": "auto", "kv_disk_size": 2 / 1024}  # 2 MiB: 80 blocks
    with kept(checkpoint("qwen3"), tmp_path / "kv", **settings) as one:
        store: Any = disk_of(one)
        for start in range(40):
            one.tokens([[3 + start] * 100], greedy(2))
            save_all(one)
        assert store.limit <= store.bytes_written <= 1.2 * store.limit
        before = store.bytes_written
        one.tokens([[3 + start] * 100], greedy(2))  # a second use
        save_all(one)
        assert store.bytes_written > before


def test_adapters_have_blocks_of_their_own(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    adapters = [
        {"name": name, "path": write_adapter(tmp_path / name, 4, seed), "base_model_name": None}
        for seed, name in enumerate("ab")
    ]
    path, names = checkpoint("llama"), ["a", "b", None, "a"]
    settings: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "lora_modules": adapters,
    }
    asked, params = (
        [PROMPTS[0]] * 4,
        SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True),
    )
    with engine(path, 2, **COMMON, **settings) as one:
        plain = run_adapters(one, asked, names, params)
    assert plain[0] == plain[3] != plain[1]
    for number in range(2):
        with kept(path, tmp_path / "kv", **settings) as one:
            assert run_adapters(one, asked, names, params) == plain
            assert (hits(one) > 0) == (number == 1)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (2, 2)])
def test_ranks_keep_their_parts(
    tensor: int, pipeline: int, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    """Other ranks have other records: they find nothing, and the same tokens."""
    path = checkpoint("wide")
    settings = {**COMMON, "dtype": "bfloat16"}
    with split_engine(path, tensor, pipeline, **settings) as one:
        plain = one.tokens(PROMPTS, greedy(COUNT))
    settings |= {"kv_disk_dir": str(tmp_path / "kv"), "kv_disk_write": "always"}
    for number in range(2):
        with split_engine(path, tensor, pipeline, **settings) as one:
            store: Any = disk_of(one)
            while not store.num_refreshes:
                time.sleep(0.01)
            assert one.tokens(PROMPTS, greedy(COUNT)) == plain
            save_all(one)
            assert (hits(one) > 0) == (number == 1)


@pytest.mark.slow
def test_a_sleeping_engine_loads_when_it_is_awake(
    filled: Path, expected: list[list[int]], checkpoint: Callable[..., str]
) -> None:
    with kept(checkpoint("qwen3"), filled) as one:
        for level in (1, 2):
            one.client.call("sleep", level)
            one.client.call("wake_up")
            before = hits(one)
            assert one.tokens(PROMPTS, greedy(COUNT)) == expected
            assert hits(one) > before


def test_an_answer_says_where_its_prompt_came_from(
    filled: Path, checkpoint: Callable[..., str]
) -> None:
    with kept(checkpoint("qwen3"), filled) as one:
        outputs = one.run([PROMPTS[0]], greedy(2))[0]
        assert (outputs[0].loaded_tokens, outputs[0].num_cached_tokens) == ({"disk": 64}, 64)
        again = one.run([PROMPTS[0]], greedy(2))[0]
        assert (again[0].loaded_tokens, again[0].num_cached_tokens) == ({}, 64)
        counts = one.client.core.counts
        assert (counts["external_prefix_cache_queries"], hits(one)) == (64, 64)
        assert (counts["kv_tier_queries:disk"], counts["kv_tier_hits:disk"]) == (4, 4)
        assert counts["kv_tier_limit:disk"] > counts["kv_tier_bytes:disk"] > 0
        assert counts["kv_active_loads"] == 0
        histograms = one.client.core.stats().histograms
        assert histograms["kv_load_size"][-1] == counts["kv_load_bytes:disk"] > 0
        assert sum(histograms["kv_lookup"][:-1]) >= 1


def test_the_rate_of_computing_is_known_after_a_restart(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    for number in range(2):
        with kept(checkpoint("qwen3"), tmp_path / "kv") as one:
            assert gate_of(one).rates.tokens_per_second == number * 123.5
            gate_of(one).rates.tokens_per_second = 123.5


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_that_fails_while_it_loads(
    depth: int, filled: Path, expected: list[list[int]], checkpoint: Callable[..., str]
) -> None:
    """Its requests end with an error, and no block of it is found by others."""
    with kept(checkpoint("qwen3"), filled, depth) as one:
        failures = fail_first_copies(one)
        with suppress(
            RuntimeError
        ):  # the step had work, or only copies: then they are loaded again
            assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        core = one.client.core
        while core.in_flight or core.scheduler.requests:
            core.step()
        assert failures
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        save_all(one)
        core.scheduler.check()
