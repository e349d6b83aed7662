"""Sampling in Triton: the words of noise to the bit, and the tokens, cutoffs and scores of the definitions.

Mutations that these must catch: `>` for `>=` at a cutoff, or no limit to the ids there; the highest instead of the lowest id among equals; a
prompt's tokens counted as output; chunks beyond the first left out.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ops.triton.kernel_device import DEVICE
from worker.reference_limits import all_survivors, limits_of, tied_logits

from quire.ops.triton import sampling
from quire.protocol.sampling_params import SamplingParams
from quire.worker.request_rows import RequestRows
from quire.worker.sampling import logprobs, top_k_top_p, triton_ops
from quire.worker.sampling.builtin_processors import Penalties
from quire.worker.sampling.gumbel import GOLDEN, _mix_, _signed, draw, keys, seed_words
from quire.worker.sampling.logits_processors import ProcessorRows

torch.set_num_threads(1)
VOCAB = 1500  # two chunks, the second not whole


def some_keys(count: int) -> torch.Tensor:
    seeds = [7 + (n << 33) for n in range(count)]
    return torch.from_numpy(keys(seed_words(seeds), np.arange(count) * 1000 + 3)).to(DEVICE)


def logits(rows: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, VOCAB, generator=made)).to(DEVICE)


@triton.jit
def words_kernel(a_ptr, b_ptr, out_ptr, vocab, COLS: tl.constexpr):
    row = tl.program_id(0)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    a = tl.load(a_ptr + row).to(tl.uint32, bitcast=True)
    b = tl.load(b_ptr + row).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + row * vocab + col, sampling.words(a, b, col), mask=col < vocab)


def test_noise_words_equal_the_reference_bits() -> None:
    rows = some_keys(5)
    got = torch.empty((5, VOCAB), dtype=torch.int32, device=DEVICE)
    words_kernel[(5, triton.cdiv(VOCAB, 1024))](rows[0], rows[1], got, VOCAB, COLS=1024)
    ids = torch.arange(VOCAB, dtype=torch.int32, device=DEVICE)
    want = ids * _signed(GOLDEN) + rows[0, :, None]
    spare = torch.empty_like(want)
    _mix_(want, spare)
    want ^= rows[1, :, None]
    _mix_(want, spare)
    assert torch.equal(got, want & 0x7FFFFFFF)


@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_tokens_equal_the_reference(spread: float) -> None:
    x, rows = logits(60, spread), some_keys(60)
    assert torch.equal(sampling.draw(x, rows), draw(x, rows))


def test_among_equal_logits_the_lowest_id_is_drawn() -> None:
    """Where noise cannot decide: it is lost beside such numbers."""
    x = torch.full((2, VOCAB), -1e30, device=DEVICE)
    x[0, [1400, 1200, 77, 78]] = 1e30
    x[1, [1033, 1024]] = 1e30
    assert sampling.draw(x, some_keys(2)).tolist() == [77, 1024]


LIMITS = {
    "top-k": (5, 1.0, 0.0),
    "one": (1, 1.0, 0.0),
    "more than there are": (5000, 1.0, 0.0),
    "top-p": (0, 0.7, 0.0),
    "hardly any": (0, 1e-9, 0.0),
    "min-p": (0, 1.0, 0.2),
    "all three": (40, 0.8, 0.01),
    "none": (0, 1.0, 0.0),
}


def test_cutoffs_equal_the_reference() -> None:
    """All kinds side by side, on logits with many ties and some that are out."""
    found = list(LIMITS.values())
    made = limits_of(*zip(*found, strict=True))
    x = (logits(len(found)) * 4).round() / 4
    x[:, ::7] = -torch.inf
    hold(x, made)


def test_ties_go_to_the_lower_id() -> None:
    """As the one definition of all samplers says, which sorts."""
    for seed in range(4):
        scaled_SV, made = tied_logits(1, VOCAB, seed)
        hold(scaled_SV.to(DEVICE), made)


def hold(x: torch.Tensor, made: np.ndarray) -> None:
    kept = x.masked_fill(~all_survivors(x.cpu(), made).to(DEVICE), -torch.inf)
    got = triton_ops.cutoff(x, made).masked_(x.clone())
    for row, (mine, want) in enumerate(zip(got, kept, strict=True)):
        assert torch.equal(mine, want), row
    rows = some_keys(len(x))
    assert torch.equal(triton_ops.draw_top_k_top_p(x, made, rows), draw(kept, rows))
    assert torch.equal(top_k_top_p.draw_top_k_top_p(x.clone(), made, rows), draw(kept, rows))


def test_a_row_draws_the_same_alone_and_batched() -> None:
    x, rows = logits(8), some_keys(8)
    whole = sampling.draw(x, rows)
    assert [
        int(sampling.draw(x[n : n + 1], rows[:, n : n + 1])) for n in range(8)
    ] == whole.tolist()


def test_penalties_equal_the_reference() -> None:
    rows = RequestRows(4, 60, 1, 16, device=DEVICE)
    draw_ids = torch.Generator().manual_seed(3)
    rows.token_ids_RL[:] = torch.randint(0, 40, rows.token_ids_RL.shape, generator=draw_ids)
    rows.num_prompt[:] = [5, 20, 1, 9]
    rows.params = [
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.25, presence_penalty=-0.5),
        None,
        SamplingParams(frequency_penalty=1.1),
        SamplingParams(repetition_penalty=0.7),
    ]
    selected = ProcessorRows(np.array([2, 0, 3]), np.array([0, 2, 3]), np.array([33, 58, 9]), rows)
    x = logits(4)
    got = triton_ops.TritonPenalties().apply(x.clone(), selected)
    want = Penalties().apply(x.clone(), selected)
    assert not torch.equal(want, x)
    assert torch.equal(got, want)


@pytest.mark.parametrize("normalise", [True, False])
def test_logprobs_equal_the_reference(normalise: bool) -> None:
    x = logits(5)
    x[:, 3:900:7] = -torch.inf
    chosen = torch.tensor([0, 1499, 10, 1024, 7], device=DEVICE)
    also = torch.tensor([[4, 1498]] * 5, device=DEVICE)
    for top, given in ((4, None), (0, None), (0, also)):
        got = triton_ops.score(x, chosen, top, given, normalise)
        want = logprobs.score(x, chosen, top, given, normalise)
        assert torch.equal(got.ids_NK, want.ids_NK)
        assert torch.equal(got.ranks_N, want.ranks_N)
        torch.testing.assert_close(got.values_NK, want.values_NK, atol=1e-5, rtol=0)
