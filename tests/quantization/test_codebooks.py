"""Weights that keep codes of 4 bits: the codes are found again, every build of the kernels equals the definition, and
checkpoints in MXFP4 and NF4 use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.quantization.codebooks import BOOKS
from quire.quantization.group_quant import Grouped
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import quantize
from tests.kernel_builds import BUILDS, kernels_of
from tests.models.harness import Runner
from tests.models.test_native import build, texts
from tests.models.test_native import plain as transformers_logits
from tests.quantization import writers
from tests.quantization.test_int4 import activations
from tests.quantization.test_quantized_experts import oss_in_mxfp4
from tests.quantization.test_quantized_formats import quantized

SHAPES = [(1, 64, 128, 64), (5, 64, 192, 64), (17, 32, 256, 128), (33, 96, 128, 64)]


def stored(name: str, outs: int, ins: int, group: int) -> tuple[Tensor, Tensor]:
    """Random codes and scales, as a file may have them: the largest of a group of NF4 or FP4 is a value of 1 or -1."""
    draw = torch.Generator().manual_seed(ins)
    code_OGS = torch.randint(0, 16, (outs, ins // group, group), generator=draw, dtype=torch.uint8)
    scale_OG = torch.rand(outs, ins // group, generator=draw) + 0.01
    if BOOKS[name].power:
        scale_OG = torch.exp2(scale_OG.mul(8).round())
        code_OGS[0] %= 3  # small values alone: the scale that is found is another
    else:
        code_OGS[..., 7] = torch.tensor(BOOKS[name].values).argmax()
    return code_OGS.flatten(1), scale_OG


def floats(name: str, code_OI: Tensor, scale_OG: Tensor) -> Tensor:
    group = code_OI.shape[1] // scale_OG.shape[1]
    return torch.tensor(BOOKS[name].values)[code_OI.int()] * scale_OG.repeat_interleave(group, 1)


@pytest.mark.parametrize("name", list(BOOKS))
def test_codes_are_found_again(name: str) -> None:
    book, group = BOOKS[name], BOOKS[name].groups[0]
    code_OI, scale_OG = stored(name, 40, 256, group)
    weight_OI = floats(name, code_OI, scale_OG)
    weight_OI[3, :group] = 0
    found = book.grouped(weight_OI, group)
    assert torch.allclose(book.means(found), weight_OI, 1e-6, 0)
    whole = (
        book.integers[found.q_OI.int()].float() - book.zero
    ) * found.scale_OG.repeat_interleave(group, 1)
    off = (whole - weight_OI).abs().amax() / scale_OG.amax()
    assert off <= {"mxfp4": 0, "nf4": 0.004, "fp4": 0.0053}[name]
    weight_OI[5, 9] *= 1.01
    assert not torch.allclose(book.means(book.grouped(weight_OI, group)), weight_OI, 1e-6, 0)


def definition(x_TI: Tensor, found: Grouped, integers: Tensor) -> Tensor:
    """Written out: whole numbers in each group, times the scales, in order."""
    y_TO, group = torch.zeros(len(x_TI), len(found.q_OI)), found.group
    for g in range(found.scale_OG.shape[1]):
        at = slice(g * group, (g + 1) * group)
        x_TS, scale_T = quantize(x_TI[:, at])
        w_OS = integers[found.q_OI[:, at].int()].double() - found.zero_OG[:, g : g + 1].double()
        y_TO += (x_TS.double() @ w_OS.T).float() * (scale_T[:, None] * found.scale_OG[:, g])
    return y_TO.bfloat16()


@pytest.mark.parametrize("build_name", BUILDS)
@pytest.mark.parametrize("name", list(BOOKS))
def test_kernels_equal_the_definition(name: str, build_name: str) -> None:
    kernels, book = kernels_of(build_name), BOOKS[name]
    for rows, outs, ins, group in SHAPES:
        found = book.grouped(floats(name, *stored(name, outs, ins, group)), group)
        x = activations(rows, ins)
        want = definition(x, found, book.integers)
        got = book.prepared(found, False, kernels).multiply(x)
        off = (got.float() - want.float()).abs()
        assert float(off.max()) <= 0.008 * float(want.float().abs().max())
        assert float((off > 0).float().mean()) < 0.1
        assert torch.equal(book.prepared(found, False, None).multiply(x), want)


def test_experts_of_gpt_oss_keep_their_codes(tmp_path: Path) -> None:
    theirs = oss_in_mxfp4(tmp_path)
    ours = build(tmp_path, model_impl="quire", dtype="bfloat16")
    experts = [layer for layer in ours.modules() if isinstance(layer, Experts)]
    refs = [ref for layer in experts for ref in layer.weights()]
    weights = [ref.prepared for ref in refs]
    assert weights
    assert all(isinstance(each, Int4Weight) and each.codes is not None for each in weights)
    plain = [layer.ref.prepared for layer in ours.modules() if isinstance(layer, Linear)]
    assert not any(isinstance(each, Int4Weight) for each in plain)
    stored_bytes = sum(ref.num_out * ref.num_in for ref in refs)
    held = sum(each.tensor.nbytes for ref in refs for each in ref.tensors() if each.name != "bias")
    assert held < 0.75 * stored_bytes
    runner, text = Runner(ours), texts()[0]
    got, want = runner.prefill(0, text), transformers_logits(theirs, text)
    assert (
        got - want
    ).square().mean().sqrt() < 0.2 * want.std()  # 8-bit activations move routers too
    assert torch.equal(runner.prefill(1, text, chunk=7), got)


def test_nf4_of_checkpoints_and_in_flight(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint keeps its codes; the same floats quantized while loading get the same ones."""
    book = BOOKS["nf4"]
    monkeypatch.setattr(writers, "NF4", torch.tensor(book.values).numpy())
    form = next(form for form in writers.FORMS if form.name == "bnb nf4")
    path, dense, _ = quantized(plain, tmp_path, form)
    kept = build(path, dtype="bfloat16")
    made = build(dense, dtype="bfloat16", quantization="bitsandbytes")
    layers = {}
    for model, count in ((kept, 13), (made, 14)):
        found = [layer.ref for layer in model.modules() if isinstance(layer, Linear)]
        found = [ref for ref in found if isinstance(ref.prepared, Int4Weight)]
        assert sum(len(ref.outputs) for ref in found) == count
        layers[model] = found
    assert any(
        torch.equal(layers[kept][0].prepared.data, ref.prepared.data) for ref in layers[made]
    )
    text = [token % 131 for token in texts()[0]]
    got = Runner(kept).prefill(0, text)
    want = Runner(build(dense)).prefill(0, text)
    assert (got - want).square().mean().sqrt() < 0.1 * want.std()
