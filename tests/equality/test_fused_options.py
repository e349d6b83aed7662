"""Each option of a layer gives the same bits fused as by its modules; what the kernels do not know stays a module."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.attention.cpu import CpuAttention
from quire.kvcache.specs import CacheSpec
from quire.layers.chunked_attention import ChunkedAttention
from quire.layers.decoder_layer import (
    POST_NORM,
    SANDWICH,
    DecoderLayer,
    GatedMLP,
    ParallelLayer,
    QueryScale,
    SelfAttention,
)
from quire.layers.moe import Experts, MoE, Router
from quire.layers.native_parts import AttentionParts
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.recurrent import GatedDeltaNet, Mamba2Mixer, Mamba2Sizes
from quire.layers.weights import weights_of
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig
from quire.native.fused_decoder import fuse_model, unfuse_model
from quire.native.fused_layers import has_attention, has_mlp, native_layer
from quire.native.model import native_model
from quire.ops.cpu.bindings import best
from quire.ops.experts import Routing
from quire.quantization.apply import pack_weights, quantize_weights
from tests.models.harness import Runner

pytestmark = [
    pytest.mark.skipif(best() is None, reason="the native kernels do not run on this CPU"),
    pytest.mark.usefixtures("native_ops"),
]

CONFIG = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
PLUS_ONE = partial(RMSNorm, eps=1e-5, plus_one=True)
CENTERED = partial(LayerNorm, eps=1e-5)
ATTENTION: dict[str, dict[str, Any]] = {
    "interleaved rotation": {"interleaved": True},
    "no rotation": {"rope": False},
    "a norm of each head": {"qk_norm": True},
    "a norm of each head, 1 + weight": {"qk_norm": True, "norm": PLUS_ONE},
    "a norm of all heads": {"full_qk_norm": True},
    "a scale of queries": {"full_qk_norm": True, "query_scale": QueryScale(0.7, 5, 1)},
    "biases": {"qkv_bias": True, "o_bias": True},
    "scale, cap, window": {"scale": 0.3, "softcap": 2.0, "window": 9},
    "other heads": {"head_dim": 128, "kv_heads": 1},
    "a gate of the output": {"output_gate": True, "qk_norm": True, "norm": PLUS_ONE},
    "gates of outputs, no norms": {"output_gate": True, "qkv_bias": True, "kv_heads": 1},
}
LAYERS: dict[str, dict[str, Any]] = {
    "sandwich": {"norms": SANDWICH},
    "sandwich, 1 + weight": {"norms": SANDWICH, "norm": PLUS_ONE},
    "norms of outputs": {"norms": POST_NORM, "residual_scale": 0.3},
    "layer norms": {"norm": CENTERED},
    "scaled residual": {"residual_scale": 0.22},
    "parallel": {"norm": CENTERED},
}
MLPS: dict[str, dict[str, Any]] = {
    "gelu": {"act": "gelu"},
    "gelu's approximation, biases": {"act": "gelu_pytorch_tanh", "bias": True},
    "another width": {"width": 96},
}
ROPES: dict[str, dict[str, Any]] = {
    "a part": {"partial_rotary_factor": 0.5},
    "two tables": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e2},
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
CASES = [
    *((name, {"attention": options}) for name, options in ATTENTION.items()),
    *((name, {"layer": options}) for name, options in LAYERS.items()),
    *((name, {"mlp": options}) for name, options in MLPS.items()),
    *((name, {"config": options}) for name, options in ROPES.items()),
    ("delta nets", {"attention": {"output_gate": True}}),
    ("mamba 2", {}),
    ("experts with weights of inputs", {"experts": {"on_input": True}}),
]


class Family(CausalLM):
    """A model whose layers have the options of a case."""

    def __init__(self, case: str, options: dict[str, dict[str, Any]]):
        self.case, self.options = case, options
        super().__init__(TextConfig({**CONFIG, **options.get("config", {})}), 128)

    def layer(self, i: int) -> nn.Module:
        if self.case == "delta nets" and i < 2:
            net = GatedDeltaNet(self.cfg, interleaved=i == 1)
            return DecoderLayer(self.cfg, net, GatedMLP(self.cfg))
        if self.case == "mamba 2" and i < 2:  # the first one's step sizes do not fill a panel
            sizes = Mamba2Sizes((4, 8)[i], 32, (1, 2)[i], 16, (4, 3)[i])
            limits, conv_bias = ((0.01, 0.4), None)[i], i == 0
            mixer = Mamba2Mixer(64, sizes, 1e-5, limits=limits, conv_bias=conv_bias, gate_first=i == 0)  # fmt: skip
            return DecoderLayer(self.cfg, mixer, GatedMLP(self.cfg))
        attention = SelfAttention(self.cfg, i, **self.options.get("attention", {}))
        mlp: nn.Module = GatedMLP(self.cfg, **self.options.get("mlp", {}))
        if "experts" in self.options:
            router = Router(
                64, 6, Routing(1, "logits", renormalize=False), bias=i == 1, float32=i > 0
            )
            mlp = MoE(router, Experts(64, 64, 6, **self.options["experts"]), mlp)
        make = ParallelLayer if self.case == "parallel" else DecoderLayer
        return make(self.cfg, attention, mlp, **self.options.get("layer", {}))


def made(case: str, options: dict[str, dict[str, Any]], quantization: str | None = None) -> Runner:
    """The model with random weights, packed, on caches of the kernels."""
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Family(case, options)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            one = parameter.dim() == 1
            parameter.copy_(torch.randn(parameter.shape) * (0.5 if one else 0.2) + one)
    if quantization:
        quantize_weights(weights_of(model), quantization)
    pack_weights(weights_of(model))
    return Runner(model, backend=CpuAttention(), dtype=torch.bfloat16)


def logits(runner: Runner) -> list[Tensor]:
    """Of two rows: whole prompts, chunks and single tokens together."""
    draw = torch.Generator().manual_seed(5)
    for row, length in enumerate((41, 23)):
        runner.add(row, torch.randint(0, 96, (length,), generator=draw).tolist())
    steps = ([(0, 17), (1, 5)], [(0, 1), (1, 1)], [(1, 16), (0, 1)], [(0, 22), (1, 1)])
    found = [each for step in steps for each in runner.step(step)]
    for row in (0, 1):
        runner.leave(row)
    return found


@pytest.mark.parametrize(("case", "options"), CASES, ids=[case for case, _ in CASES])
def test_an_option_gives_the_same_bits_fused(case: str, options: dict[str, Any]) -> None:
    runner = made(case, options)
    fuse_model(runner.model)
    native = native_model(runner.model)
    assert native is not None
    assert native.num_groups == (2 if case == "two tables" else 1)
    fused = logits(runner)
    unfuse_model(runner.model)
    plain = logits(runner)
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
    assert fused[0].isfinite().all()
    assert fused[0].std() > 0.1
    assert not torch.equal(logits(made("none", {}))[0], fused[0])


def test_quantized_weights_take_the_activation() -> None:
    for quantization in ("int8", "int4"):
        runner = made("gelu", {"mlp": {"act": "gelu_pytorch_tanh"}}, quantization)
        fuse_model(runner.model)
        fused = logits(runner)
        unfuse_model(runner.model)
        assert all(torch.equal(a, b) for a, b in zip(fused, logits(runner), strict=True))


class OtherNorm(RMSNorm):
    """A norm that the kernels do not know."""


class OtherLayer(DecoderLayer):
    """A layer with an MLP of its own."""

    def mlp_sublayer(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        return super().mlp_sublayer(-x_TD, residual_TD)


def test_what_the_kernels_do_not_know_stays_a_module() -> None:
    runner = made("plain", {})
    layers: Any = runner.model.model.layers
    layer = layers[0]

    def halves(pairs: int = 32) -> tuple[bool, bool]:
        found = native_layer(layer, pairs)
        return has_attention(found), has_mlp(found)

    assert halves() == (True, True)
    assert halves(pairs=8) == halves(pairs=48) == (False, True)
    norms = layer.norms
    for role, wanted in (
        *(("attention_in", (False, True)), ("attention_out", (False, True))),
        *(("mlp_in", (True, False)), ("mlp_out", (True, False))),
    ):
        layer.norms = norms._replace(**{role: OtherNorm(64, 1e-5)})
        assert halves() == wanted, role
    layer.norms = norms
    layer.self_attn.q_norm = layer.self_attn.k_norm = OtherNorm(64, 1e-5)
    assert halves() == (False, True)
    layer.self_attn.q_norm = layer.self_attn.k_norm = LayerNorm(4, 64, eps=1e-5)
    assert halves() == (False, True)
    layer.self_attn.q_norm = layer.self_attn.k_norm = None
    layer.__class__ = OtherLayer
    assert halves() == (True, False)
    layer.self_attn.attn.__class__ = ChunkedAttention
    assert halves() == (False, False)


class SilentAttention(SelfAttention):
    """A family's attention that says nothing."""


class DeclaredAttention(SelfAttention):
    """A family's attention that says that it computes what `SelfAttention` does."""

    def native(self) -> AttentionParts:
        return AttentionParts(self)


def test_a_family_says_how_it_fuses() -> None:
    runner = made("plain", {})
    layers: Any = runner.model.model.layers
    plain = logits(runner)
    for kind, whole in ((SilentAttention, False), (DeclaredAttention, True)):
        for layer in layers:
            layer.self_attn.__class__ = kind
        fuse_model(runner.model)
        assert has_attention(native_layer(layers[0], 32)) == whole
        assert (native_model(runner.model) is not None) == whole
        assert all(torch.equal(a, b) for a, b in zip(logits(runner), plain, strict=True))


class FinishedLayer(DecoderLayer):
    """A layer that does more after its halves."""

    def finish(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        return x_TD * 0.5, residual_TD * 0.5


def test_a_layer_that_does_more_keeps_its_fused_halves() -> None:
    runner = made("plain", {})
    before = logits(runner)
    layers: Any = runner.model.model.layers
    for layer in layers:
        layer.__class__ = FinishedLayer
    plain = logits(runner)
    fuse_model(runner.model)
    assert len(layers.fused._parts(frozenset())) == 2 * len(layers) + 1
    assert native_model(runner.model) is None
    fused = logits(runner)
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
    assert not torch.equal(before[0], plain[0])


def test_heads_that_the_kernels_do_not_take_get_no_cache() -> None:
    spec = CacheSpec(num_kv_heads=2, head_dim=16, v_head_dim=16, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"multiple of 32 features .* not 16 and 16"):
        CpuAttention().cache_parts(spec, 4, 16)
