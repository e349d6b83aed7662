"""Decoder layers in few kernel calls give the bits of their modules; a module that is foreign to the kernels keeps the rest fused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from torch import Tensor, nn

from quire.layers.decoder_layer import DecoderLayer
from quire.native.fused_decoder import NativeRun
from quire.native.fused_layers import has_attention, has_mlp
from quire.ops.cpu.bindings import best
from quire.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU")


def worker_of(one: Engine) -> Any:
    return one.client.core.executor.worker  # type: ignore[attr-defined]


def by_parts(one: Engine) -> Any:
    """The worker, without the fast path: layers stay fused."""
    worker = worker_of(one)
    worker.fast_step.accepts_fast_step = lambda plan: False
    return worker


@pytest.mark.sampled(2)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "qwen2"])
def test_fused_layers_produce_the_same_tokens(
    kind: str, quantization: str | None, tmp_path: Path
) -> None:
    path = make_checkpoint(kind, tmp_path, intermediate_size=128, head_dim=32)
    drawn = SamplingParams(seed=5, max_tokens=32, ignore_eos=True)
    found = []
    for fused in (True, False):
        settings = {"dtype": "bfloat16", "quantization": quantization}
        with engine(path, **settings, max_num_batched_tokens=50) as one:
            worker = by_parts(one)
            if not fused:
                worker.unfuse("test")
            decoder = worker.model.model.layers.fused
            assert (decoder is not None and decoder.whole is not None) == fused
            found.append((one.tokens(prompts(6), greedy(32)), one.tokens(prompts(6), drawn)))
    assert found[0] == found[1]


GEMMA_4: dict[str, dict[str, Any]] = {
    "shared keys and values": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
    "keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
}


@pytest.mark.parametrize("case", GEMMA_4)
def test_gemma_4_keeps_both_halves_fused(case: str, tmp_path: Path) -> None:
    path = make_checkpoint(
        "gemma4_text", tmp_path,
        **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "sliding_window": 24, **GEMMA_4[case]},
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
        intermediate_size=128, head_dim=32, global_head_dim=64, vocab_size_per_layer_input=211,
    )  # fmt: skip
    with engine(path, dtype="bfloat16", max_num_batched_tokens=50) as one:
        worker = by_parts(one)
        layers = worker.model.model.layers
        assert all(has_attention(layer) and has_mlp(layer) for _, layer in layers.fused.structs)
        found = one.tokens(prompts(4), greedy(12))
        worker.unfuse("test")
        one.client.call("reset_prefix_cache")
        assert one.tokens(prompts(4), greedy(12)) == found


class Mixture(nn.Module):
    """Two experts with the weights of one MLP; each token takes one."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp, self.calls = mlp, 0

    def forward(self, x_TD: Tensor) -> Tensor:
        self.calls += 1
        y_TD = self.mlp(x_TD)
        return torch.where(x_TD[:, :1] > 0, y_TD, -y_TD)


class ForeignAttention(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention, self.calls = attention, 0

    def forward(self, x_TD: Tensor, angles: Any) -> Tensor:
        self.calls += 1
        return 2 * self.attention(x_TD, angles)


class ForeignLayer(DecoderLayer):
    """A layer of another type, with the modules of a `DecoderLayer`."""

    def __init__(self, layer: Any):
        nn.Module.__init__(self)
        for name, module in layer.named_children():
            setattr(self, name, module)
        self.norms, self.residual_scale = layer.norms, layer.residual_scale
        self.calls = 0

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        return super().forward(*args)


def put_mixtures(layers: Any, numbers: set[int]) -> list[Any]:
    for number in numbers:
        layers[number].mlp = Mixture(layers[number].mlp)
    return [layers[number].mlp for number in numbers]


def put_attentions(layers: Any, numbers: set[int]) -> list[Any]:
    for number in numbers:
        layers[number].self_attn = ForeignAttention(layers[number].self_attn)
    return [layers[number].self_attn for number in numbers]


def put_layers(layers: Any, numbers: set[int]) -> list[Any]:
    for number in numbers:
        layers[number] = ForeignLayer(layers[number])
    return [layers[number] for number in numbers]


Put = Callable[[Any, set[int]], list[Any]]
# what is foreign, in which of three layers; native halves of layers, by run
FOREIGN: dict[str, tuple[Put, set[int], list[int]]] = {
    "every MLP": (put_mixtures, {0, 1, 2}, [1, 1, 1]),
    "the middle MLP": (put_mixtures, {1}, [2, 1]),
    "the last MLP": (put_mixtures, {2}, [3]),
    "every attention": (put_attentions, {0, 1, 2}, [1, 1, 1]),
    "the middle attention": (put_attentions, {1}, [1, 2]),
    "the first layer": (put_layers, {0}, [2]),
    "the middle layer": (put_layers, {1}, [1, 1]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("case", FOREIGN)
def test_native_layers_beside_a_foreign_module_stay_fused(
    case: str, depth: int, tmp_path: Path
) -> None:
    put, numbers, runs = FOREIGN[case]
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    found, foreign = [], []
    for fused in (True, False):
        with engine(path, depth, dtype="bfloat16", max_num_batched_tokens=50) as one:
            worker = worker_of(one)
            plain = one.tokens(prompts(4), greedy(3))
            foreign = put(worker.model.model.layers, numbers)
            worker.set_models(worker.models)
            if not fused:
                worker.unfuse("test")
            decoder = worker.model.model.layers.fused
            if fused:
                parts = decoder._parts(frozenset())
                assert [part.count for part in parts if isinstance(part, NativeRun)] == runs
                assert decoder.whole is None
            assert worker.fast_step.model is None
            one.client.call("reset_prefix_cache")
            found.append(one.tokens(prompts(4), greedy(24)))
            assert all(module.calls > 20 for module in foreign)
    assert found[0] == found[1]
    if "layer" not in case:
        assert [text[:3] for text in found[0]] != plain


def test_a_foreign_module_of_another_dtype_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    with engine(path, dtype="bfloat16") as one:
        worker = worker_of(one)
        (mixture,) = put_mixtures(worker.model.model.layers, {1})
        worker.set_models(worker.models)
        mixture.forward = lambda x_TD: x_TD.float()
        with pytest.raises(RuntimeError, match="the step failed"):
            one.tokens([[5, 6]], greedy(2))
    assert "returned torch.float32, not torch.bfloat16" in caplog.text
