"""An engine with offloaded weights gives the tokens of an engine with resident weights."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from engines import engine, greedy, make_checkpoint, prompts
from torch import Tensor

from quire.errors import ConfigError, Unsupported
from quire.layers.linear import Linear
from quire.models.offload import GIB
from quire.platforms.cpu import CpuPlatform
from quire.quantization.apply import weight_bytes

COUNT = 6
LAYERS = 6


class Apart:
    """Two memories of one machine: a place holds nothing of worth until something is copied to it."""

    def __init__(self) -> None:
        self.copies = 0

    def host(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def device(self, size: int) -> Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)

    def mark(self) -> None:
        return None

    def copy(self, pairs, after: None) -> None:
        self.copies += 1
        for into, source in pairs:
            into.copy_(source)

    def wait(self, mark: None) -> None:
        pass


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("six")
    return make_checkpoint("qwen3", folder, num_hidden_layers=LAYERS)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Apart:
    found = Apart()
    monkeypatch.setattr(CpuPlatform, "copier", lambda self: found)
    monkeypatch.setattr(CpuPlatform, "kernels", ("reference",))
    return found


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tokens_are_the_same(quantization: str | None, apart: Apart, path: str, caplog) -> None:
    asked = prompts(3, longest=30)
    settings = {"quantization": quantization, "max_num_batched_tokens": 16}
    with engine(path, **settings) as one:
        want = one.tokens(asked, greedy(COUNT))
        whole = one.client.core.executor.worker.model
        layers = [sum(p.nbytes for p in parts(layer)) for layer in whole.model.layers]
        held = weight_bytes(whole)
    with caplog.at_level(logging.INFO), engine(path, cpu_offload_gb=2.5 * layers[0] / GIB, **settings) as one:  # fmt: skip
        model = one.client.core.executor.worker.model
        assert weight_bytes(model) == held - 3 * layers[0]  # five travel, and two places stay
        assert one.tokens(asked, greedy(COUNT)) == want
        passes = apart.copies
        assert one.tokens(asked, greedy(COUNT)) == want
        assert not model.capturable
        one.client.call(
            "sleep", 1
        )  # its weights cannot be moved: they are dropped, and loaded again
        one.client.call("wake_up")
        assert one.client.core.executor.worker.model is not model
        assert one.tokens(asked, greedy(COUNT)) == want
    assert passes > 5
    assert "5 layers" in caplog.text


def test_layers_with_recurrent_states(apart: Apart, tmp_path: Path) -> None:
    """Weights travel; states, decays and convolutions stay."""
    more = {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
    }
    kinds = ["linear_attention", "full_attention"] * 2
    path = make_checkpoint(
        "qwen3_5_text", tmp_path, num_hidden_layers=4, layer_types=kinds, linear_value_head_dim=16, **more
    )  # fmt: skip
    asked, found = prompts(3, longest=30), []
    for gib in (0.0, 1e4 / GIB):
        with engine(path, cpu_offload_gb=gib, max_num_batched_tokens=16) as one:
            found += [one.tokens(asked, greedy(COUNT)) for _ in range(2)]
    assert apart.copies > 4
    assert all(each == found[0] for each in found)


def parts(layer: torch.nn.Module) -> list[Tensor]:
    from quire.layers.weights import weight_tensors

    assert any(isinstance(module, Linear) for module in layer.modules())
    return [part.tensor for part in weight_tensors(layer)]


def test_offloading_does_nothing_on_a_cpu(path: str, caplog) -> None:
    with engine(path, cpu_offload_gb=4.0) as one:
        assert one.client.core.executor.worker.model.movable
    assert "cpu_offload_gb has no effect" in caplog.text


def test_offloading_is_refused_for_the_transformers_backend(apart: Apart, path: str) -> None:
    with (
        pytest.raises(Unsupported, match="cpu_offload_gb for Qwen3ForCausalLM, which runs through"),
        engine(path, cpu_offload_gb=1, model_impl="transformers"),
    ):
        pass


def test_a_negative_size_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="cpu_offload_gb=-1"), engine(path, cpu_offload_gb=-1):
        pass
