"""Recurrent layers in Triton: equal to their definitions, and with the same bits however a row's tokens are cut."""

from __future__ import annotations

import pytest
import torch
from ops.test_recurrent import ROWS, check_kept_states, problems
from ops.triton.kernel_device import DEVICE

from quire.ops import recurrent
from quire.ops.triton import recurrent as kernels  # noqa: F401

torch.set_num_threads(1)

WHOLE = [[(4, 0, 3), (0, 0, 1), (2, 0, 5), (5, 0, 2)]]
CUT = [[(2, 0, 1), (4, 0, 2)], [(5, 0, 2), (2, 1, 5)], [(4, 2, 3), (0, 0, 1)]]
TILED = ("convolution of 4", "delta rule of 4 heads")  # the interpreter takes a second for each


@pytest.mark.skipif(DEVICE != "cpu", reason="its inputs are on the host")
@pytest.mark.parametrize(
    "odd", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tiles", "other sizes"]
)
def test_kernels_equal_the_definitions(odd: bool) -> None:
    rows = list(ROWS)
    """Sizes in tiles for some, other sizes for the rest."""
    for name, problem in problems(torch.float32, odd):
        if (name not in TILED) is not odd:
            continue
        run = problem.op.implementations["triton"]
        want, want_after = problem.run(problem.op.reference, WHOLE)
        whole, after = problem.run(run, WHOLE)
        cut, after_cuts = problem.run(run, CUT)
        assert (whole - want).abs().max() <= 4e-6 * want.abs().max(), name
        difference = (after[rows] - want_after[rows]).abs().max()
        assert difference <= 4e-6 * want_after[rows].abs().max(), name
        assert torch.equal(whole, cut), name
        assert torch.equal(after[rows], after_cuts[rows]), name
        assert after[[1, 3]].isnan().all(), f"{name} wrote to a row without tokens"
        check_kept_states(name, problem, run, 3)


@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norm(gate_first: bool) -> None:
    torch.manual_seed(3)
    x, wide = torch.randn(5, 72, device=DEVICE), torch.randn(5, 200, device=DEVICE)
    for size, features in ((24, 24), (36, 72), (72, 72)):
        weight = torch.randn(features, device=DEVICE)
        arguments = (x, wide[:, 16:88], weight, 1e-5, size, gate_first)
        want = recurrent.gated_rms_norm.reference(*arguments)
        got = recurrent.gated_rms_norm.implementations["triton"](*arguments)
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()
