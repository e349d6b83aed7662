"""Ops of recurrent layers: the kernels equal the definitions, and a row has the same bits however its tokens are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops import recurrent
from quire.ops.cpu import recurrent as native
from quire.ops.recurrent import Gates, StateRows, recurrence_shape, scan_shape
from tests.kernel_builds import BUILDS, kernels_of

LENGTHS = (5, 1, 21, 2)
ROWS = (4, 0, 2, 5)  # of six
Run = Callable[..., Tensor]


def step_rows(cuts: list[tuple[int, int, int]]) -> StateRows:
    """Rows with the tokens from..to of (row, from, to)."""
    ends = torch.tensor([0, *(to - start for _, start, to in cuts)]).cumsum(0)
    return StateRows(torch.tensor([row for row, _, _ in cuts]), ends.int())


class Problem:
    """An op, its inputs by token for all rows, its other arguments, and the shape of its state."""

    def __init__(
        self, op: Any, inputs: list[Tensor | None], shape: tuple[int, ...], dtype: torch.dtype, call: Any
    ):  # fmt: skip
        self.op, self.inputs, self.shape, self.dtype, self.call = op, inputs, shape, dtype, call

    def run(self, run: Run, cuts: list[list[tuple[int, int, int]]]) -> tuple[Tensor, Tensor]:
        """The outputs of all tokens, row by row, and the state after the cuts."""
        wide = torch.full((6, 3 + math.prod(self.shape)), float("nan")).to(self.dtype)
        state = wide[:, 3:].unflatten(1, self.shape)
        state[list(ROWS)] = 0.0
        offsets = dict(zip(ROWS, torch.tensor([0, *LENGTHS]).cumsum(0).tolist(), strict=False))
        out: dict[int, list[Tensor]] = {row: [] for row in ROWS}
        for step in cuts:
            at = [offsets[row] + t for row, start, to in step for t in range(start, to)]
            inputs = [None if x is None else x[at] for x in self.inputs]
            found = self.call(run, inputs, state, step_rows(step))
            for (row, _, _), part in zip(
                step, found.split([to - start for _, start, to in step]), strict=True
            ):
                out[row].append(part)
        return torch.cat([part for row in ROWS for part in out[row]]), state


def check_kept_states(name: str, problem: Problem, run: Run, most: int = 21) -> None:
    """The states that a step keeps equal the states of steps that end there."""
    kept = {6: 0, 7: 1, 8: most - 1}  # by entry: the token of row 2
    at = range(LENGTHS[0] + LENGTHS[1], LENGTHS[0] + LENGTHS[1] + most)

    def states(count: int, kept_T: Tensor | None) -> Tensor:
        wide = torch.full((9, 3 + math.prod(problem.shape)), float("nan")).to(problem.dtype)
        state = wide[:, 3:].unflatten(1, problem.shape)
        state[2] = 0.0
        inputs = [None if x is None else x[list(at[:count])] for x in problem.inputs]
        problem.call(run, inputs, state, step_rows([(2, 0, count)])._replace(kept_T=kept_T))
        return state

    kept_T = torch.zeros(len(at), dtype=torch.int64)
    kept_T[list(kept.values())] = torch.tensor(list(kept))
    found = states(len(at), kept_T)
    for entry, token in kept.items():
        assert torch.equal(found[entry], states(token + 1, None)[2]), name
    assert found[[0, 1, 3, 4, 5]].isnan().all(), f"{name} wrote to other entries"


WHOLE = [[(row, 0, n) for row, n in zip(ROWS, LENGTHS, strict=True)]]
CUT = [
    [(2, 0, 1), (4, 0, 3)],
    [(5, 0, 2)],
    [(2, 1, 18), (0, 0, 1)],
    [(4, 3, 4), (2, 18, 21)],
    [(4, 4, 5)],
]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sum(LENGTHS), *shape).to(dtype)


def problems(dtype: torch.dtype, odd: bool) -> Iterator[tuple[str, Problem]]:
    """`odd`: sizes that no kernel takes."""
    torch.manual_seed(5)
    channels = 24 if odd else 48
    for taps, activate, bias in ((4, True, False), (3, False, True), (2, True, True)):
        weight = torch.randn(channels, taps).to(dtype)
        offset = torch.randn(channels).to(dtype) if bias else None
        yield f"convolution of {taps}", Problem(
            recurrent.causal_conv, [draw(channels, dtype=dtype)], (taps - 1, channels), dtype,
            lambda run, x, state, rows, w=weight, b=offset, a=activate: run(*x, w, b, state, rows, a),
        )  # fmt: skip
    size, value = (12, 20) if odd else (32, 48)
    for delta, heads in ((True, 2), (True, 4), (False, 4), (False, 8)):
        gates = Gates(torch.randn(heads), torch.randn(heads) * 0.5)
        if not delta:
            gates = gates._replace(skip_G=torch.randn(heads), low=0.1, high=2.0)
        wide = draw(2, 2 * size, dtype=dtype).flatten(1)  # q and k as parts of one product
        q, k = (x.unflatten(1, (2, size)) for x in wide.split(2 * size, 1))
        write = draw(heads, dtype=dtype) if delta else None
        inputs = [q, k, draw(heads, value, dtype=dtype), draw(heads, dtype=dtype), write]
        yield f"{'delta rule' if delta else 'Mamba-2'} of {heads} heads", Problem(
            recurrent.linear_recurrence, inputs, recurrence_shape(heads, size, value), torch.float32,
            lambda run, x, state, rows, g=gates: run(*x, g, state, rows),
        )  # fmt: skip
    a, skip = torch.rand(channels, 6), torch.randn(channels)
    x, b, c = draw(channels, dtype=dtype), draw(6, dtype=dtype), draw(6, dtype=dtype)
    yield "selective scan", Problem(
        recurrent.selective_scan, [x, draw(channels).abs(), b, c], scan_shape(channels, 6), torch.float32,
        lambda run, x, state, rows: run(x[0], x[1], a, x[2], x[3], skip, state, rows),
    )  # fmt: skip
    yield "decaying sum", Problem(
        recurrent.decaying_sum, [draw(channels), draw(channels).sigmoid()], (channels,), torch.float32,
        lambda run, x, state, rows: run(*x, state, rows),
    )  # fmt: skip
    decay, first = torch.randn(channels), torch.randn(channels)
    yield "RWKV", Problem(
        recurrent.wkv, [30 * draw(channels), draw(channels)], (3, channels), torch.float32,
        lambda run, x, state, rows: run(*x, decay, first, state, rows),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("odd", [False, True], ids=["kernel sizes", "other sizes"])
def test_definitions_do_not_depend_on_cuts(dtype: torch.dtype, odd: bool) -> None:
    for name, problem in problems(dtype, odd):
        whole, after = problem.run(problem.op.reference, WHOLE)
        cut, after_cuts = problem.run(problem.op.reference, CUT)
        assert torch.isfinite(whole).all(), name
        assert torch.equal(whole, cut), name
        assert torch.equal(after[list(ROWS)], after_cuts[list(ROWS)]), name
        assert after[[1, 3]].isnan().all(), f"{name} wrote to a row without tokens"
        check_kept_states(name, problem, problem.op.reference)


@pytest.fixture(params=BUILDS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found = kernels_of(request.param)
    monkeypatch.setattr(native, "best", lambda: found)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_kernels_equal_the_definitions(kernels: str, dtype: torch.dtype) -> None:
    for name, problem in problems(dtype, odd=False):
        share = 2e-6 if dtype == torch.float32 else 5e-3
        if name == "RWKV":  # the definition is 3e-6 from float64: keys of 100 have steps of 8e-6
            share = max(share, 1e-5)
        run = problem.op.implementations["native"]
        want, want_after = problem.run(problem.op.reference, WHOLE)
        whole, after = problem.run(run, WHOLE)
        cut, after_cuts = problem.run(run, CUT)
        assert (whole - want).abs().max() <= share * want.abs().max(), name
        rows = list(ROWS)
        difference = (after[rows].float() - want_after[rows].float()).abs().max()
        assert difference <= share * want_after[rows].abs().max(), name
        assert torch.equal(whole, cut), name
        assert torch.equal(after[rows], after_cuts[rows]), name
        assert after[[1, 3]].isnan().all(), f"{name} wrote to a row without tokens"
        check_kept_states(name, problem, run)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norm(kernels: str, dtype: torch.dtype, gate_first: bool) -> None:
    torch.manual_seed(3)
    x, wide = torch.randn(7, 96), torch.randn(7, 200).to(dtype)
    run = recurrent.gated_rms_norm.implementations["native"]
    for size in (32, 48, 96):
        for features in (size, 96):
            weight = torch.randn(features).to(dtype)
            arguments = (x, wide[:, 16:112], weight, 1e-5, size, gate_first)
            want = recurrent.gated_rms_norm.reference(*arguments).float()
            got = run(*arguments).float()
            assert (got - want).abs().max() <= 0.01 * want.abs().max()
            if dtype == torch.float32:
                assert (got - want).abs().max() <= 1e-6 * want.abs().max()
