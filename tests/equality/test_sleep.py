"""An engine that slept gives the tokens it gave before, and its memory was the system's meanwhile."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts

from quire.errors import QuireError
from quire.native.fused_decoder import FusedDecoder
from quire.observe.process_memory import resident_bytes
from quire.ops.cpu.bindings import best

MIB = 1 << 20
CACHE = 96 * MIB
CASES: dict[str, dict[str, Any]] = {
    "native": {},
    "fused": {"dtype": "bfloat16"},
    "its own cache": {"model_impl": "transformers"},
}


def rss() -> int:
    return resident_bytes(["self"])  # type: ignore[list-item]


def model_of(one: Engine) -> Any:
    worker: Any = one.client.core.executor
    return worker.worker.model


def answers(one: Engine) -> list[list[int]]:
    return one.tokens(prompts(5), greedy(20))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_same_after_sleep(case: str, tmp_path: Path) -> None:
    if case == "fused" and best() is None:
        pytest.skip("the native kernels do not run on this CPU")
    kind = "mamba" if case == "its own cache" else "qwen3"
    path = make_checkpoint(kind, tmp_path, intermediate_size=128)
    with engine(path, **CASES[case]) as one:
        before = answers(one)
        fused = [getattr(module, "fused", None) for module in model_of(one).modules()]
        assert any(isinstance(one, FusedDecoder) for one in fused) == (case == "fused")
        del fused
        for level in (1, 2):
            model = weakref.ref(model_of(one))
            one.client.call("sleep", level)
            assert (model() is None) == (level == 2)
            if level == 2:
                with pytest.raises(QuireError, match="wake it up"):
                    one.client.call("collective_rpc", "num_parameters", [], {})
            assert one.client.call("wake_up") == []
            first, *_ = one.run(prompts(1), greedy(20))
            assert first[-1].num_cached_tokens == 0
            assert answers(one) == before


@pytest.mark.slow
def test_a_separate_device_is_filled_again_after_sleep(tmp_path: Path) -> None:
    """As on an accelerator: the cache's tensors go, and the source is told that addresses are others."""
    with engine(make_checkpoint("qwen3", tmp_path), model_impl="native") as one:
        worker = one.client.core.executor.worker  # type: ignore[attr-defined]
        rest = worker.functions["wake_up_worker"].__self__
        rest.in_place = False
        before = answers(one)
        for level, parts in ((1, ["kv_cache", "weights"]), (2, ["weights", "kv_cache"]), (1, None)):
            cache = weakref.ref(rest.storages[0][0])
            model = worker.model
            told = []
            worker.fuse = lambda reason, told=told, fuse=worker.fuse: (
                told.append(reason) or fuse(reason)
            )
            one.client.call("sleep", level)
            assert cache() is None
            assert all(layer.spec.cache is None for layer in model.attention_layers())
            del model
            for part in parts or [None]:
                one.client.call("wake_up", part and [part])
            assert told
            assert answers(one) == before


def test_sleep_returns_memory_to_the_system(tmp_path: Path) -> None:
    shape = {"vocab_size": 40_000, "hidden_size": 256, "dtype": "float32"}
    path = make_checkpoint("qwen3", tmp_path, **shape)
    with engine(path, kv_cache_memory_bytes=CACHE, max_model_len=512, max_num_seqs=400) as one:
        before = one.tokens(prompts(2), greedy(5))
        parts = [part for layer in model_of(one).attention_layers() for part in layer.spec.cache]
        held = sum(part.numel() * part.itemsize for part in parts)
        assert held > 0.7 * CACHE
        for part in parts:
            part.fill_(1.0)
        full = rss()
        one.client.call("sleep", 1)
        asleep = rss()
        assert full - asleep > 0.95 * held
        assert all(not part[1:-1].any() for part in parts)  # fresh pages
        weights = sum(p.numel() * p.itemsize for p in model_of(one).parameters())
        assert weights > 40 * MIB
        del parts, part
        full = rss()
        one.client.call("sleep", 2)
        assert full - rss() > 0.8 * weights
        one.client.call("wake_up")
        assert one.tokens(prompts(2), greedy(5)) == before


def test_a_failed_reload_of_weights_is_reported(tmp_path: Path) -> None:
    path = Path(make_checkpoint("qwen3", tmp_path))
    with engine(str(path)) as one:
        before = answers(one)
        one.client.call("sleep", 2)
        file = path / "model.safetensors"
        file.rename(path / "gone")
        with pytest.raises(QuireError, match="safetensors"):
            one.client.call("wake_up")
        assert one.client.call("is_sleeping") is True
        (path / "gone").rename(file)
        assert one.client.call("wake_up") == []
        assert answers(one) == before
