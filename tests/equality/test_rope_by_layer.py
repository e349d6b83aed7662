"""Layers with different rotary embeddings: each gets its own angles, by parts and by one kernel call for a layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equality.engines import engine, greedy, make_checkpoint, prompts
from torch import Tensor

from quire.layers.rotary import Rotary
from quire.ops.cpu.bindings import best

TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
NARROW, WIDE = 24, 4096  # WIDE exceeds every request, so all layers are in one KV group


def checkpoint(folder: Path, window: int) -> str:
    """A Qwen 3 whose layers differ in their rotary embedding, as layers of Gemma 3 do."""
    path = make_checkpoint(
        "qwen3", folder, intermediate_size=128, layer_types=TYPES, use_sliding_window=True, sliding_window=window,
    )  # fmt: skip
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "rope_parameters": ROPES}))
    return path


def reference(path: str, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, by Transformers' Qwen 3; hooks give each layer its angles."""
    config = transformers.AutoConfig.from_pretrained(
        path, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32
    )

    def own_angles(kind: str) -> Any:
        theta, factor = ROPES[kind]["rope_theta"], ROPES[kind].get("factor", 1.0)

        def hook(_: Any, args: Any, options: dict[str, Any]) -> Any:
            size = config.head_dim
            frequencies = theta ** (-torch.arange(0, size, 2).float() / size) / factor
            angles: Tensor = options["position_ids"][0][:, None] * frequencies
            both = torch.cat((angles, angles), -1)[None]
            return args, {**options, "position_embeddings": (both.cos(), both.sin())}

        return hook

    for layer, kind in zip(model.model.layers, TYPES, strict=True):
        layer.register_forward_pre_hook(own_angles(kind), with_kwargs=True)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("window", [NARROW, WIDE])
def test_each_layer_has_the_angles_of_its_type(window: int, depth: int, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, window)
    asked = prompts(4)
    with engine(path, depth, model_impl="quire", max_num_batched_tokens=50) as one:
        assert len(one.client.core.executor.worker.model.model.rotary.kinds) == 2
        got = one.tokens(asked, greedy(12))
    assert got == [reference(path, prompt, 12) for prompt in asked]


@pytest.mark.skipif(best() is None, reason="no native kernels run here")
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("window", [NARROW, WIDE])
def test_fused_layers_use_the_rope_of_their_layer_type(
    window: int, depth: int, tmp_path: Path
) -> None:
    path, found = checkpoint(tmp_path, window), []
    for fused in (True, False):
        with engine(path, depth, dtype="bfloat16", max_num_batched_tokens=50) as one:
            worker = one.client.core.executor.worker
            if not fused:
                worker.unfuse("test")
            found.append(one.tokens(prompts(6), greedy(32)))
            decoder = worker.model.model.layers.fused
            assert (decoder is not None and decoder.whole is not None) == fused
            assert (worker.fast_step.model is not None) == fused
    assert found[0] == found[1]


def test_layers_of_equal_parameters_share_their_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.layers.rotary import LayerRotaries

    one, other = ({"rope_type": "default", "rope_theta": theta} for theta in (1e4, 1e6))
    rotary, counted, angles = LayerRotaries(8, [one, other, dict(one), one]), [], Rotary.forward
    monkeypatch.setattr(
        Rotary, "forward", lambda self, at: counted.append(self) or angles(self, at)
    )
    first, second, third, fourth = rotary(torch.arange(5))
    assert first is third is fourth
    assert not torch.equal(first[0], second[0])
    assert len(counted) == 2
    assert rotary.shared is None
    assert LayerRotaries(8, [one, one]).shared is not None
