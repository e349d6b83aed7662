"""Engines that share blocks in a redis server give the same tokens as engines alone, `==`, and never use what they must not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import Engine, engine, greedy
from kv_tiers.kept import COMMON, count, gate_of, hits, save_all, spoil, until
from kv_tiers.redis_server import client, needs_redis, redis_server
from safetensors.torch import load_file, save_file

from quire.features.kv_tiers import lookups
from quire.kvstore import redis_store
from quire.kvstore.key_file import make_key

pytestmark = needs_redis
COUNT = 6
PROMPTS = [[9, 8, 7] * 15 + [20 + n] * 30 for n in range(3)]
WHOLE = 64
"""Tokens of a prompt that are full blocks."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    make_key(path)
    return path


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has several parts."""
    monkeypatch.setattr(redis_store, "PART", 4096)
    monkeypatch.setattr(redis_store, "PROBE_BYTES", 4096)


@contextmanager
def sharing(path: str, url: str, key: Path, depth: int | None = 2, **more: Any) -> Iterator[Engine]:
    settings = {**COMMON, "kv_remote_url": url, "kv_key_file": str(key), **more}
    with engine(path, depth, **settings) as one:
        store = gate_of(one).store
        until(lambda: store.is_open, "the server is found")
        spoil(one)
        yield one


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[..., str]) -> list[list[int]]:
    with engine(checkpoint("qwen3"), 2, **COMMON) as one:
        return one.tokens(PROMPTS, greedy(COUNT))


def test_two_engines_share_blocks(
    checkpoint: Callable[..., str], server: str, key_file: Path, expected: list[list[int]]
) -> None:
    path = checkpoint("qwen3")
    with sharing(path, server, key_file) as one, sharing(path, server, key_file, 3) as two:
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        save_all(one)
        assert count(one, "kv_store_bytes:redis") > 0
        outputs = two.run([PROMPTS[0]], greedy(COUNT))[0]
        assert outputs[0].loaded_tokens == {"redis": WHOLE}
        assert two.tokens(PROMPTS, greedy(COUNT)) == expected
        assert hits(two) == count(two, "kv_cached_tokens:redis") >= 2 * WHOLE
        client(server).flushall()
        spoil(two)
        assert two.tokens(PROMPTS, greedy(COUNT)) == expected  # a flushed server is a miss
        save_all(two)
        spoil(one)
        before = hits(one)
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        assert hits(one) >= before + 2 * WHOLE  # and the blocks are kept again
        for each in (one, two):
            each.client.core.scheduler.check()


@pytest.mark.slow
def test_a_server_that_hangs(
    checkpoint: Callable[..., str], key_file: Path, tmp_path: Path, expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is asked for a moment, then left alone."""
    monkeypatch.setattr(redis_store, "ASK_S", 0.2)
    monkeypatch.setattr(lookups, "LOOKUP_S", 0.3)
    path = checkpoint("qwen3")
    with redis_server(tmp_path) as url, sharing(path, url, key_file) as one:
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        save_all(one)
        spoil(one)
        client(url).execute_command("CLIENT", "PAUSE", "20000", "ALL")
        assert one.tokens(PROMPTS[:1], greedy(COUNT)) == expected[:1]
        assert not gate_of(one).store.is_open
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        assert hits(one) == 0


def test_a_server_that_is_not_there_at_the_start(
    checkpoint: Callable[..., str], key_file: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    settings = {**COMMON, "kv_remote_url": f"unix://{tmp_path}/redis.sock", "kv_key_file": str(key_file)}  # fmt: skip
    with engine(checkpoint("qwen3"), 2, **settings) as one:
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected


@pytest.fixture
def filled(checkpoint: Callable[..., str], server: str, key_file: Path) -> str:
    """The URL of the server, which has the prompts' blocks."""
    redis, url = client(server), server
    if not redis.exists("filled"):
        redis.flushall()
        with sharing(checkpoint("qwen3"), url, key_file) as one:
            one.tokens(PROMPTS, greedy(COUNT))
            save_all(one)
        with sharing(checkpoint("qwen3"), url, key_file) as one:
            one.tokens(PROMPTS, greedy(COUNT))
            assert hits(one) == 3 * WHOLE
        redis.set("filled", 1)
    return url


CHANGES: dict[str, dict[str, Any]] = {
    "KV format": {"kv_cache_dtype": "int8"},
    "block size": {"block_size": 32},
    "rope": {"hf_overrides": {"rope_theta": 12345.0}},
    "key": {},
    "weights": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_an_engine_that_differs_finds_nothing(
    change: str, checkpoint: Callable[..., str], filled: str, key_file: Path, tmp_path: Path
) -> None:
    path, key = checkpoint("qwen3"), key_file
    if change == "key":
        key = tmp_path / "key"
        make_key(key)
    if change == "weights":
        shutil.copytree(path, tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
        weights = load_file(file)
        with torch.no_grad():
            weights["model.layers.1.mlp.up_proj.weight"][3, 3] += 1
        save_file(weights, file, {"format": "pt"})
        path = str(tmp_path / "model")
    with sharing(path, filled, key, **CHANGES[change]) as one:
        one.tokens(PROMPTS, greedy(COUNT))
        assert count(one, "external_prefix_cache_queries") > hits(one) == 0
        assert count(one, "kv_tier_errors:redis") == 0  # not one record was read


def test_who_writes_the_server_does_not_choose_what_the_model_remembers(
    checkpoint: Callable[..., str], server: str, key_file: Path, expected: list[list[int]]
) -> None:
    """An attacker exchanges the contents of all records on the server, then cuts each record: every block is computed again."""
    path, redis = checkpoint("qwen3"), client(server)
    redis.flushall()
    with sharing(path, server, key_file) as one:
        one.tokens(PROMPTS, greedy(COUNT))
        save_all(one)
        names = sorted(name for name in redis.keys("*") if name.count(b":") == 3)
        values = redis.mget(names)
        redis.mset(dict(zip(names, values[1:] + values[:1], strict=True)))
    for attack in ("exchanged", "cut"):
        with sharing(path, server, key_file) as one:
            assert one.tokens(PROMPTS, greedy(COUNT)) == expected
            assert hits(one) == 0
            assert sum(n for k, n in one.client.core.counts.items() if k.startswith("kv_load_failures")) > 0  # fmt: skip
            one.client.core.scheduler.check()
        if attack == "exchanged":
            redis.mset({name: value[:-1] for name, value in zip(names, values, strict=True)})


def test_a_disk_and_a_server(
    checkpoint: Callable[..., str], server: str, key_file: Path, tmp_path: Path, expected: list[list[int]]
) -> None:  # fmt: skip
    """Blocks go to both, and come from the disk first."""
    path, both = checkpoint("qwen3"), {"kv_disk_dir": str(tmp_path / "kv"), "kv_disk_write": "always"}  # fmt: skip
    client(server).flushall()
    with sharing(path, server, key_file, **both) as one:
        until(lambda: all(store.is_open for store in gate_of(one).store.stores), "both open")
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        save_all(one)
        assert count(one, "kv_store_bytes:disk") == count(one, "kv_store_bytes:redis") > 0
        spoil(one)
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        assert count(one, "kv_cached_tokens:disk") >= 2 * WHOLE
        assert count(one, "kv_cached_tokens:redis") == 0
    with sharing(path, server, key_file) as one:
        assert one.tokens(PROMPTS, greedy(COUNT)) == expected
        assert count(one, "kv_cached_tokens:redis") >= 2 * WHOLE
