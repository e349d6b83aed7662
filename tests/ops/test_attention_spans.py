"""Tokens that see later tokens of their row: against the formula, and with the same bits in every batch and chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops.test_attention import LENGTHS, Rows, formula, layer_of

from quire.forward_context import SeenSpan

SPANS = {0: [(3, 11), (11, 20)], 2: [(0, 30), (50, 66)], 3: [(40, 41)], 5: [(20, 36)]}
"""By row of LENGTHS: first token, and last + 1."""
KINDS = ["plain", "window", "long window", "softcap", "sinks", "latent"]


class SpanRows(Rows):
    windows_only = False

    def seen_spans(self, parts):
        found, at = [], 0
        for index, (row, start, end) in enumerate(parts):
            for first, last in SPANS.get(row, ()):
                seen = max(first, start)
                if seen < min(last, end):
                    assert last <= end  # a step has all later tokens of a span
                    place = at + seen - start, last - seen, index, seen, last
                    found.append(SeenSpan(*place, self.windows_only))
            at += end - start
        return found


def end_of(row: int, at: int) -> int:
    return next((last for first, last in SPANS.get(row, ()) if first <= at < last), at + 1)


def want(rows: Rows, row: int, at: int) -> torch.Tensor:
    """The formula counts a window from the last key, and this one counts from the token."""
    spec, keys = rows.layer.spec, slice(0, end_of(row, at))
    if spec.window is not None:
        keys = slice(max(0, at - spec.window + 1), keys.stop)
    rows.layer.spec = replace(spec, window=None)
    try:
        return formula(rows.layer, rows.q[row][at], rows.k[row][keys], rows.v[row][keys])
    finally:
        rows.layer.spec = spec


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_a_span_sees_the_whole_span(kind):
    rows = SpanRows(layer_of(kind), LENGTHS, block_size=8, tile=16)
    for work in ([(0, 20), (2, 33), (3, 41)], [(0, 3), (2, 37), (1, 1), (5, 36)], [(4, 2), (5, 4)]):
        for (row, n), out in zip(work, rows.step(work), strict=True):
            for i in range(n):
                at = rows.done[row] - n + i
                torch.testing.assert_close(out[i].double(), want(rows, row, at), atol=2e-6, rtol=1e-5)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_alone_batched_and_after_a_part_of_the_span(kind):
    """A prefix of a span may be in the cache: its keys were computed with the whole span."""
    together = SpanRows(layer_of(kind), LENGTHS, 8, 16)
    whole = together.step(list(enumerate(LENGTHS)))
    for row, n in enumerate(LENGTHS):
        alone = SpanRows(layer_of(kind), LENGTHS, 8, 16)
        assert torch.equal(alone.step([(row, n)])[0], whole[row])
        for first, last in SPANS.get(row, ()):
            again = SpanRows(layer_of(kind), LENGTHS, 8, 16)
            again.step([(row, n)])
            again.done[row] = start = (first + last) // 2
            (rest,) = again.step([(row, n - start)])
            assert torch.equal(rest, whole[row][start:])


def test_spans_of_layers_with_windows_only():
    for kind, differs in (("plain", False), ("window", True)):
        causal = Rows(layer_of(kind), LENGTHS, 8, 16).step([(0, 23)])[0]
        rows = SpanRows(layer_of(kind), LENGTHS, 8, 16)
        rows.windows_only = True
        assert torch.equal(rows.step([(0, 23)])[0], causal) is not differs
