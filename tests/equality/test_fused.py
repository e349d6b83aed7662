"""A decoder layer in one call of the CPU's kernels gives the bits of its parts one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from equality.engines import engine, greedy, make_checkpoint, prompts

from quire.layers.decoder_layer import PreNormLayer
from quire.native.fused_decoder import FusedLayer
from quire.ops.cpu.bindings import best
from quire.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "qwen2"])
def test_fused_layers_give_the_same_tokens(
    kind: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(kind, tmp_path, intermediate_size=128, head_dim=32)
    drawn = SamplingParams(seed=5, max_tokens=32, ignore_eos=True)
    found = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(FusedLayer, "ready", lambda self, angles: False)
        settings = {"dtype": "bfloat16", "quantization": quantization}
        with engine(path, **settings, max_num_batched_tokens=50) as one:
            model = one.client.core.executor.worker.model
            layers = [m for m in model.modules() if isinstance(m, PreNormLayer)]
            assert layers
            assert all(layer.fused is not None for layer in layers)
            found.append((one.tokens(prompts(6), greedy(32)), one.tokens(prompts(6), drawn)))
            told = [layer.fused.told is not None for layer in layers]
            assert all(told) if fused else not any(told)
    assert found[0] == found[1]
