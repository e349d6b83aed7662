"""The CPU platform says what `facts.py` found out, and names only what there is."""

from __future__ import annotations

import pytest
import torch

from quire.attention.base import BACKENDS
from quire.ops.dispatch import MODULES
from quire.platforms import facts
from quire.platforms.base import Platform
from quire.platforms.cpu import CpuPlatform


def test_it_is_a_platform_that_says_what_the_facts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(facts, "cpu_name", lambda: "A processor")
    monkeypatch.setattr(facts, "memory", lambda: (100, 40))
    platform: Platform = CpuPlatform()
    about = facts.cpu_facts()
    assert (platform.name, platform.device) == ("cpu", torch.device("cpu"))
    assert platform.description == "A processor"
    assert platform.memory() == (100, 40)
    assert platform.memory().available == 40
    assert platform.supports("bfloat16")
    assert platform.supports("float32")
    assert not platform.supports("float16")
    for stored in ("float32", "bfloat16", "float16"):
        assert platform.preferred_dtype(stored) == about.preferred_dtype(stored)
    assert platform.default_depth == about.depth
    assert platform.default_block_size == about.block_size
    assert platform.default_num_batched_tokens == about.num_batched_tokens


def test_it_names_what_there_is() -> None:
    platform = CpuPlatform()
    assert set(platform.attention) <= set(BACKENDS)
    assert set(platform.kernels) <= {*MODULES, "native", "reference"}
    assert platform.kernels[-1] == "reference"
