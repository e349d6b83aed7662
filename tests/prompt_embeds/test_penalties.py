"""Penalties count no token for a part of a prompt that is embeddings, not even the placeholder's."""

from __future__ import annotations

import numpy as np
import torch

from quire.protocol.plan import EnteredRow
from quire.protocol.request import EMBEDDINGS, MediaItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.builtin_processors import Penalties
from quire.worker.sampling.logits_processors import ProcessorRows

PARAMS = SamplingParams(repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.4)
LOGITS_V = torch.linspace(-3, 3, 12)


def penalized(*requests: tuple[list[int], list[int], list[tuple[int, int]]]) -> torch.Tensor:
    """logits_SV of (prompt, output, [start, length) of embeddings), which draw in one step."""
    rows, penalties = RequestRows(len(requests), 64, 0, 4), Penalties()
    for row, (prompt, output, parts) in enumerate(requests):
        media = [MediaItem("", f"{EMBEDDINGS}float32", start, length) for start, length in parts]
        new = EnteredRow(row, str(row), prompt + output, len(prompt), 0, [], PARAMS, media=media)
        rows.enter(new)
        assert penalties.enter(new)
    at = np.arange(len(requests))
    selected = ProcessorRows(at, at, rows.length[: len(requests)].copy(), rows)
    return penalties.apply(LOGITS_V.repeat(len(requests), 1), selected)


def test_placeholders_are_not_tokens_of_the_prompt() -> None:
    output = [3, 10, 3]
    mixed = penalized(
        ([0, 0, 7, 8, 0], output, [(0, 2), (4, 1)]), ([7, 8], output, []), ([0, 7, 8], output, [])
    )
    assert torch.equal(mixed[0], mixed[1])
    assert mixed[2, 0] != mixed[1, 0]  # here 0 is a token


def test_a_placeholder_may_be_drawn() -> None:
    both = penalized(([0, 0], [0, 5], [(0, 2)]), ([5], [0, 5], []))
    assert torch.equal(both[0], both[1])


def test_a_prompt_of_embeddings_alone_changes_no_first_token() -> None:
    assert torch.equal(penalized(([0, 0, 0], [], [(0, 3)]))[0], LOGITS_V)
