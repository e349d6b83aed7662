"""The memory plan's forecast of weights, from file headers, equals the loaded engine's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from equality.engines import engine, make_checkpoint

from quire.models.checkpoint_files import in_memory, on_disk, stored_tensors
from quire.quantization.apply import weight_bytes

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000}


@pytest.mark.parametrize(
    ("kind", "schemes"),
    [("qwen3", (None, "int8", "int4_g32")), ("llama", ("int8",))],  # the first ties its head
)
def test_the_memory_forecast_equals_the_weights(
    kind: str, schemes: tuple[str | None, ...], tmp_path: Path
) -> None:
    path = make_checkpoint(kind, tmp_path, **SHAPE)
    found = stored_tensors(path)
    assert in_memory(found, 4) == on_disk(found)  # float32
    for scheme in schemes:
        with engine(path, dtype="bfloat16", quantization=scheme) as one:
            held = weight_bytes(one.client.core.executor.worker.model)  # type: ignore[attr-defined]
        assert in_memory(found, 2, scheme) == pytest.approx(held, rel=0.04), scheme
        assert held < 0.51 * on_disk(found)
