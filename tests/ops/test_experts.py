"""Routed experts on a CPU: the kernels equal the definition for every form of weight, and no row depends on another."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.layers.mla import LatentProjections
from quire.layers.moe import Experts
from quire.layers.prepared_weight import PreparedWeight
from quire.ops import experts as definitions
from quire.ops.cpu import bindings
from quire.ops.cpu import experts as cpu_experts
from quire.ops.cpu.structs import ACTIVATIONS, CExperts, CWeight
from quire.ops.experts import HeadWeights, Routing
from quire.parallel.ranks import OutputSlice
from quire.quantization.apply import pack_weights, quantize_weights
from quire.quantization.bf16_packed import PackedBf16Weight
from quire.quantization.gguf_blocks import BlockRows, BlocksWeight
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight
from tests.kernel_builds import BUILDS, kernels_of

HIDDEN, INNER, EXPERTS, CHOSEN = 128, 96, 7, 3
Make = Callable[[Tensor, bool, bindings.Kernels | None], PreparedWeight]
FORMS: dict[str, Make] = {
    "bf16": lambda weight, gated, kernels: PackedBf16Weight.of(kernels, weight, gated),  # type: ignore[arg-type]
    "int8": Int8Weight.of,
    "int4": lambda weight, gated, kernels: Int4Weight.of(weight, gated, kernels, group=32),
    "Q4_0": lambda weight, gated, kernels: BlocksWeight([_blocks(weight)], gated, kernels),
}


def _blocks(weight_OI: Tensor) -> BlockRows:
    import gguf

    blocks = gguf.quants.quantize(weight_OI.float().numpy(), gguf.GGMLQuantizationType.Q4_0)
    return BlockRows("Q4_0", torch.from_numpy(blocks))


@pytest.fixture(params=BUILDS)
def kernels(request: pytest.FixtureRequest) -> bindings.Kernels:
    return kernels_of(request.param)


class Mixture:
    """Random experts, prepared in one form, or each expert in another."""

    def __init__(
        self,
        kernels: bindings.Kernels,
        forms: list[str],
        *,
        biased: bool = False,
        act: str = "silu",
    ):
        rng = torch.Generator().manual_seed(len(forms))
        self.kernels, self.inner = kernels, 128 if "int8" in forms else INNER
        ungated = act in ("relu", "relu2")
        first = (self.inner, HIDDEN, False) if ungated else (2 * self.inner, HIDDEN, True)
        shapes = (first, (HIDDEN, self.inner, False))
        self.pairs, self.biases, self.floats = [], [], []
        for expert in range(EXPERTS):
            make = FORMS[forms[expert % len(forms)]]
            for outs, ins, gated in shapes:
                weight = (torch.randn(outs, ins, generator=rng) * ins**-0.5).bfloat16()
                self.floats.append(weight)
                self.pairs.append(make(weight, gated, kernels))
                self.biases.append(torch.randn(outs, generator=rng).bfloat16() if biased else None)
        self.weights = (CWeight * len(self.pairs))(*map(self._weight, self.pairs, self.biases))
        self.gate_up = (CWeight * EXPERTS)(*self.weights[::2])
        self.down = (CWeight * EXPERTS)(*self.weights[1::2])
        self.struct = CExperts(
            ctypes.addressof(self.gate_up), ctypes.addressof(self.down), EXPERTS, CHOSEN, HIDDEN,
            ACTIVATIONS[act],
        )  # fmt: skip

    @staticmethod
    def _weight(prepared: PreparedWeight, bias: Tensor | None) -> CWeight:
        address = None if bias is None else bias.data_ptr()
        args = prepared.kernel_args()
        return CWeight(**args, bias=address, outs=prepared.outs, ins=prepared.ins)

    def __call__(self, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        y_TD = torch.full((len(x_TD), HIDDEN), float("nan"), dtype=torch.bfloat16)
        self.kernels.experts(
            ctypes.addressof(self.struct), x_TD.data_ptr(), x_TD.stride(0), ids_Tk.data_ptr(), weights_Tk.data_ptr(),
            y_TD.data_ptr(), len(x_TD),
        )  # fmt: skip
        return y_TD

    def by_linears(self, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """The same by the kernels of linear layers, one pair at a time."""
        y_TD = torch.zeros(len(x_TD), HIDDEN)
        for t, ids in enumerate(ids_Tk.tolist()):
            for j, e in enumerate(ids):
                if not 0 <= e < EXPERTS:
                    continue
                up, down = self.pairs[2 * e], self.pairs[2 * e + 1]
                inner = up.multiply(x_TD[t : t + 1], self.biases[2 * e])
                outer = down.multiply(inner, self.biases[2 * e + 1])[0]
                y_TD[t] += outer.float() * weights_Tk[t, j]
        return y_TD.bfloat16()


def routed(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(tokens, HIDDEN, generator=rng).bfloat16()
    weights_Tk, ids_Tk = torch.rand(tokens, EXPERTS, generator=rng).topk(CHOSEN)
    return x_TD, ids_Tk.contiguous(), weights_Tk.contiguous()


@pytest.mark.parametrize("forms", [["bf16"], ["int8"], ["int4"], ["Q4_0"], ["bf16", "int8", "int4", "Q4_0"]], ids="-".join)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_kernels_have_the_bits_of_linears(
    kernels: bindings.Kernels, forms: list[str], tokens: int
) -> None:
    mixture = Mixture(kernels, forms, biased=tokens == 5)
    found = mixture(*routed(tokens))
    assert torch.equal(found, mixture.by_linears(*routed(tokens)))


def activated(y_I: Tensor, act: str) -> Tensor:
    if act in ("relu", "relu2"):
        return y_I.relu() ** (2 if act == "relu2" else 1)
    gate, other = y_I.chunk(2)
    if act == "clamped_swiglu":
        gate, other = gate.clamp(max=7), other.clamp(-7, 7)
        return (other + 1) * gate * torch.sigmoid(1.702 * gate)
    if act == "silu":
        return F.silu(gate) * other
    return F.gelu(gate, approximate="tanh" if act == "gelu_pytorch_tanh" else "none") * other


@pytest.mark.parametrize("act", list(ACTIVATIONS))
def test_the_definition(kernels: bindings.Kernels, act: str) -> None:
    """In plain torch, from the 16-bit weights."""
    mixture = Mixture(kernels, ["bf16"], biased=True, act=act)
    x_TD, ids_Tk, weights_Tk = routed(20)
    x_TD *= 4  # some values beyond the limit of the clamped activation
    y_TD = torch.zeros(20, HIDDEN, dtype=torch.float64)
    for t, ids in enumerate(ids_Tk.tolist()):
        for j, e in enumerate(ids):
            up, down = (each.double() for each in mixture.floats[2 * e : 2 * e + 2])
            up_bias, down_bias = (each.double() for each in mixture.biases[2 * e : 2 * e + 2])
            inner = activated(up @ x_TD[t].double() + up_bias, act)
            y_TD[t] += weights_Tk[t, j] * (down @ inner + down_bias)
    off = mixture(x_TD, ids_Tk, weights_Tk).double() - y_TD
    assert float(off.abs().max()) < 0.01 * float(y_TD.abs().max())


@pytest.mark.parametrize("act", ["clamped_swiglu", "relu2"])
def test_a_value_that_is_not_a_number_stays_one(kernels: bindings.Kernels, act: str) -> None:
    mixture, (x_TD, ids_Tk, weights_Tk) = Mixture(kernels, ["bf16"], act=act), routed(3)
    x_TD[1, 5] = float("nan")
    assert mixture(x_TD, ids_Tk, weights_Tk).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("form", list(FORMS))
def test_a_row_does_not_depend_on_other_rows(kernels: bindings.Kernels, form: str) -> None:
    mixture, (x_TD, ids_Tk, weights_Tk) = Mixture(kernels, [form]), routed(41, seed=4)
    ids_Tk[:, 0] = 2  # an expert that all rows chose
    together = mixture(x_TD, ids_Tk, weights_Tk)
    for t in (0, 17, 40):
        alone = mixture(x_TD[t : t + 1], ids_Tk[t : t + 1], weights_Tk[t : t + 1])
        assert torch.equal(alone[0], together[t])
    wide = torch.zeros(41, HIDDEN + 64, dtype=torch.bfloat16)
    wide[:, :HIDDEN] = x_TD
    assert torch.equal(mixture(wide[:, :HIDDEN], ids_Tk, weights_Tk), together)


def test_threads_change_no_bit(kernels: bindings.Kernels) -> None:
    mixture, before, found = Mixture(kernels, ["int4", "bf16"]), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [mixture(*routed(tokens)) for tokens in (1, 30)]
    finally:
        torch.set_num_threads(before)
    for part in (found[2:4], found[4:6]):
        assert all(map(torch.equal, part, found[:2]))


def test_experts_of_other_places_add_nothing(kernels: bindings.Kernels) -> None:
    mixture, (x_TD, ids_Tk, weights_Tk) = Mixture(kernels, ["bf16"]), routed(6)
    ids_Tk[1] = -1
    ids_Tk[3, 1] = EXPERTS
    found = mixture(x_TD, ids_Tk, weights_Tk)
    assert not found[1].any()
    assert torch.equal(found, mixture.by_linears(x_TD, ids_Tk, weights_Tk))


# -- the ops ---------------------------------------------------------------------------------------
ROUTINGS = [
    Routing(3), Routing(1, renormalize=False), Routing(4, eps=1e-3, scale=2.5, rounds=True),
    Routing(2, "sigmoid", eps=1e-20, scale=1.5), Routing(EXPERTS, "logits"), Routing(1, "logits", renormalize=False),
    Routing(3, "sigmoid", groups=4, top_groups=2), Routing(3, groups=4, top_groups=2, group_score="max", renormalize=False),
    Routing(2, jitter=0.1),
]  # fmt: skip


@pytest.mark.parametrize("how", ROUTINGS, ids=str)
def test_choice_of_experts(
    kernels: bindings.Kernels, how: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_experts, "best", lambda: kernels)
    count = 20 if how.groups > 1 else EXPERTS
    rng = torch.Generator().manual_seed(how.k)
    for tokens, dtype in itertools.product((1, 40), (torch.bfloat16, torch.float32)):
        wide_TE = torch.randn(tokens, count + 3, generator=rng).to(dtype)
        wide_TE[0] = 0  # ties
        for bias_E in (None, torch.randn(count, generator=rng)):
            given = wide_TE[:, :count], bias_E, how
            ids_TK, weights_TK = definitions.route.implementations["native"](*given)
            want_TK, exact_TK = definitions.route.reference(*given)
            assert torch.equal(ids_TK, want_TK)
            share = 1 / 200 if how.rounds and dtype == torch.bfloat16 else 1e-5
            assert ((weights_TK - exact_TK).abs() <= share * exact_TK.abs()).all()
            alone = definitions.route.implementations["native"](wide_TE[-1:, :count], bias_E, how)
            assert torch.equal(alone[1], weights_TK[-1:])


@pytest.mark.parametrize("method", ["bf16", "int8", "int4", "int4_g32"])
@pytest.mark.parametrize("act", ["silu", "relu2", "clamped_swiglu"])
def test_a_layer_equals_its_definition(method: str, act: str) -> None:
    """Online quantization and packing reach the experts, and the kernels multiply what the definition does."""
    if bindings.best() is None:
        pytest.skip("the native kernels do not run on this CPU")
    torch.manual_seed(7)
    layer = Experts(HIDDEN, 128, EXPERTS, act=act, bias=act == "clamped_swiglu").bfloat16()
    for ref in layer.weights():
        ref.dtype = torch.bfloat16
        for name, tensor in ref.parameters().items():
            scale = 1.0 if name.endswith("bias") else ref.num_in**-0.5
            tensor.data = (torch.randn(tensor.shape) * scale).bfloat16()
    plain = layer(*routed(9)).float()
    refs = list(layer.weights())
    count = pack_weights(refs) if method == "bf16" else quantize_weights(refs, method)
    assert count == 2 * EXPERTS
    want = definitions.experts.reference(*routed(9), layer.of)
    found = definitions.experts.implementations["native"](*routed(9), layer.of)
    assert layer.of.prepared is not None
    assert torch.equal(found, want)
    share = {"bf16": 0.02, "int8": 0.05}.get(method, 0.3)
    assert float((found.float() - plain).abs().max()) < share * float(plain.abs().max())


@pytest.mark.parametrize("method", ["bf16", "int8"])
@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_products_of_pairs_and_their_sum_are_the_whole(method: str, act: str) -> None:
    """With ids outside of the experts, and each product by its definition too."""
    if bindings.best() is None:
        pytest.skip("the native kernels do not run on this CPU")
    torch.manual_seed(7)
    layer = Experts(HIDDEN, 128, EXPERTS, act=act).bfloat16()
    for ref in layer.weights():
        ref.dtype = torch.bfloat16
        for tensor in ref.parameters().values():
            tensor.data = (torch.randn(tensor.shape) * ref.num_in**-0.5).bfloat16()
    refs = list(layer.weights())
    pack_weights(refs) if method == "bf16" else quantize_weights(refs, method)
    for tokens in (1, 6, 70):
        x_TD, ids_TK, weights_TK = routed(tokens)
        ids_TK[0, 1] = -1
        whole = definitions.experts.implementations["native"](x_TD, ids_TK, weights_TK, layer.of)
        y_PD, ids_P = x_TD, ids_TK.flatten()
        for down in (False, True):
            given = y_PD, ids_P, layer.of, down
            y_PD = definitions.expert_products.implementations["native"](*given)
            assert torch.equal(y_PD, definitions.expert_products.reference(*given))
        total = definitions.weighted_sum.implementations["native"]
        y_TKD = y_PD.view(*ids_TK.shape, -1)
        assert torch.equal(total(y_TKD, weights_TK), whole)
        assert torch.equal(definitions.weighted_sum.reference(y_TKD, weights_TK), whole)


@pytest.mark.parametrize("method", [None, "int8"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_each_head_is_multiplied_by_its_own_weight(
    kernels: bindings.Kernels, method: str | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_experts, "best", lambda: kernels)
    monkeypatch.setattr("quire.quantization.apply.best", lambda: kernels)
    monkeypatch.setattr("quire.quantization.apply.kernels_for", lambda dtype: kernels)
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = LatentProjections(heads=OutputSlice(0, 5, 5), latent=128, nope=64, value=96)
    finally:
        torch.set_default_dtype(torch.float32)
    rng = torch.Generator().manual_seed(tokens)
    for ref in layer.weights():
        ref.weight.copy_(torch.randn(ref.weight.shape, generator=rng) * 0.1)
    if method is None:
        pack_weights(layer.weights())
    else:
        quantize_weights(layer.weights(), method)
    for of, ins in ((HeadWeights(layer.keys), 64), (HeadWeights(layer.values), 128)):
        wide_THI = torch.randn(tokens, 5, ins + 32, generator=rng).bfloat16()
        x_THI = wide_THI[..., :ins]  # as a part of each query
        assert cpu_experts.native_heads(of) is not None
        y_THO = definitions.per_head.implementations["native"](x_THI, of)
        assert torch.equal(y_THO, definitions.per_head.reference(x_THI, of))
