"""Engines with a folder of kept blocks, whose cache has a pattern where no block was written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from equality.engines import Engine, engine

from quire.features.kv_tiers.gate import KVTierGate
from quire.kvstore.disk import DiskStore

SIZE = 16  # tokens of a block
COMMON: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": SIZE}
PATIENCE_S = 60.0


def gate_of(one: Engine) -> KVTierGate:
    return next(g for g in one.client.core.scheduler.gates if isinstance(g, KVTierGate))


def disk_of(one: Engine) -> DiskStore:
    return next(s for s in gate_of(one).store.stores if isinstance(s, DiskStore))


def spoil(one: Engine) -> None:
    """Forget the cached blocks, and overwrite them."""
    assert one.client.core.scheduler.kv.reset()
    for listener in one.client.core.listeners:
        listener.on_cache_reset()
    workers = getattr(one.client.core.executor, "workers", None) or [
        one.client.core.executor.worker
    ]
    for worker in workers:
        for model in worker.models:
            for layer in model.attention_layers():
                for part in layer.spec.cache:
                    part.fill_(torch.nan) if part.is_floating_point() else part.fill_(77)


def until(reached: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.002)


@contextmanager
def kept(path: str, folder: Path, depth: int | None = 2, **more: Any) -> Iterator[Engine]:
    """When its store has read the folder. The blocks that it computes are on disk when it ends."""
    settings = {**COMMON, "kv_disk_dir": str(folder), "kv_disk_write": "always", **more}
    with engine(path, depth, **settings) as one:
        store = disk_of(one)
        until(lambda: store.num_refreshes or store.why_off, "the store opens")
        spoil(one)
        yield one


def fail_first_copies(one: Engine) -> list[int]:
    """The first step with copies of blocks will fail. Returns a list that then has the number of this step."""
    worker: Any = one.client.core.executor.worker  # type: ignore[attr-defined]
    hook: Any = next(hook for hook in worker.hooks if hook.name == "kv_tiers")
    before, failures = hook.before, list[int]()

    def fail_first(plan: Any, batch: Any) -> None:
        if "kv_tiers" in plan.extras and not failures:
            failures.append(plan.step)
            raise RuntimeError("a fault of the device")
        before(plan, batch)

    hook.before = fail_first
    return failures


def save_all(one: Engine) -> None:
    """Run steps until every block that the engine has computed is on disk."""
    gate, core = gate_of(one), one.client.core

    def saved() -> bool:
        core.receive(block=False)
        core.step()
        return not (gate.wants_plan() or gate.transfers.num_writing)

    until(saved, "all blocks are saved")


def count(one: Engine, name: str) -> float:
    return one.client.core.counts.get(name, 0.0)


def hits(one: Engine) -> float:
    """Tokens that were loaded."""
    return count(one, "external_prefix_cache_hits")
