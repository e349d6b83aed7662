"""What a plan forecasts of the weights, from headers, is what an engine then holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from equality.engines import engine, make_checkpoint

from quire.models.formats import in_memory, on_disk, stored
from quire.quantization.registry import bytes_held

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # the first ties its head to its table
def test_the_forecast_is_what_is_held(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path, **SHAPE)
    found = stored(path)
    floats = on_disk(found)  # float32
    assert in_memory(found, 4) == floats
    held = {}
    for scheme in (None, "int8", "int4", "int4_g32"):
        with engine(path, dtype="bfloat16", quantization=scheme) as one:
            held[scheme] = bytes_held(one.client.core.executor.worker.model)  # type: ignore[attr-defined]
        assert in_memory(found, 2, scheme) == pytest.approx(held[scheme], rel=0.04), scheme
    assert held["int4"] < held["int4_g32"] < held["int8"] < 0.8 * held[None] < 0.41 * floats
