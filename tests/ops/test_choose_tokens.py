"""The best token and masks: our kernels equal the definition in every bit, with ties, in every build."""

from __future__ import annotations

import pytest
import torch

from quire.ops import masked_argmax
from quire.ops.cpu import masked_argmax as native
from tests.kernel_builds import BUILDS, kernels_of

SIZES = [(1, 1), (3, 15), (2, 16), (5, 33), (4, 259), (7, 1000), (2, 4099)]


@pytest.fixture(autouse=True, params=BUILDS)
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_of(request.param)
    monkeypatch.setattr(native, "library", lambda: kernels)


def draw(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with many ties, in a wider tensor, and masks, the last of which allows nothing."""
    torch.manual_seed(seed)
    logits = torch.randint(-9, 9, (rows, vocab + 5)).to(dtype)[:, :vocab]
    words = torch.randint(
        -(2**31), 2**31 - 1, (rows, masked_argmax.num_words(vocab)), dtype=torch.int64
    )
    words[-1] = 0
    return logits, words.to(torch.int32)


def same(mine: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for name, a, b in zip(("token", "whole", "kept"), mine, theirs, strict=True):
        if name == "token":  # of a row without any it means nothing
            a, b = (torch.where(mine[2].isneginf(), 0, x) for x in (a, b))
        assert torch.equal(a, b), name
        assert a.dtype == b.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_the_best(rows: int, vocab: int, dtype: torch.dtype):
    for seed in range(3):
        logits, words = draw(rows, vocab, dtype, seed)
        same(native._argmax(logits), masked_argmax.argmax.reference(logits))
        same(native._argmax(logits, words), masked_argmax.argmax.reference(logits, words))
        lowest = [row.tolist().index(max(row.tolist())) for row in logits]
        assert (
            native._argmax(logits)[0].tolist()
            == lowest
            == masked_argmax.argmax.reference(logits)[0].tolist()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 17, 40])
def test_nan_logits_are_detected(dtype: torch.dtype, place: int):
    for bad, finite in ((torch.nan, False), (torch.inf, False), (-torch.inf, True)):
        logits, words = draw(2, 41, dtype, 1)
        logits[0, place] = bad
        _, whole, _ = native._argmax(logits, words)
        assert whole.isfinite().tolist() == [finite, True]
        assert masked_argmax.argmax.reference(logits)[1].isfinite().tolist() == [finite, True]
    none = torch.full((1, 41), -torch.inf, dtype=dtype)
    assert native._argmax(none)[1].isneginf().all()


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_a_mask_over_logits(rows: int, vocab: int):
    logits, words = draw(rows, vocab, torch.float32, 5)
    beside = logits.clone()
    mine = native._mask_logits(logits, words)
    assert mine is logits
    assert torch.equal(mine, masked_argmax.mask_logits.reference(beside, words))
    assert mine[-1].isneginf().all()
