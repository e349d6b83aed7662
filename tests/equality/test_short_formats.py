"""Bfloat16: in another batch the same request may round differently, but only between two nearly equal tokens.

What is exact in float32 (test_same_tokens.py) is bounded here: a token may differ only where the exact logits of the
two are closer than what rounding did to the logits at that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from engines import engine, greedy, prompts

COUNT = 40
COMPANY: dict[str, dict[str, Any]] = {
    "batched": {},
    "two at a time": {"max_num_seqs": 2},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
}
KINDS = ["qwen3", "mistral", "cwm"]  # plain; with windows; through the generic backend


@cache
def alone(path: str) -> list[list[int]]:
    with engine(path, dtype="bfloat16") as one:
        return [one.tokens([prompt], greedy(COUNT))[0] for prompt in prompts(6)]


@cache
def models(path: str) -> tuple[Any, Any]:
    """Transformers in bfloat16, and in float32 with the same rounded weights."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    short = load(path, dtype=torch.bfloat16).eval()
    return short, load(path, dtype=torch.bfloat16).float().eval()


def differences(mine: list[list[int]], theirs: list[list[int]]) -> Iterator[tuple[int, int]]:
    """(prompt, place) of the first difference of each request; after it the texts are different ones."""
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if place is not None:
            yield index, place


def gap_and_rounding(path: str, tokens: list[int], one: int, other: int) -> tuple[float, float]:
    """How far apart the exact logits of two tokens are, and how far rounding moves a logit here."""
    short, exact = models(path)
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        rounded_V, exact_V = (model(ids).logits[0, -1].float() for model in (short, exact))
    return float((exact_V[one] - exact_V[other]).abs()), float((rounded_V - exact_V).abs().max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", COMPANY)
@pytest.mark.parametrize("kind", KINDS)
def test_only_near_ties_differ(
    kind: str, setting: str, checkpoint: Callable[[str], str], record_property
) -> None:
    path = checkpoint(kind)
    with engine(path, dtype="bfloat16", **COMPANY[setting]) as one:
        got = one.tokens(prompts(6), greedy(COUNT))
    found = list(differences(got, alone(path)))
    for index, place in found:
        before = prompts(6)[index] + alone(path)[index][:place]
        pair = got[index][place], alone(path)[index][place]
        gap, rounding = gap_and_rounding(path, before, *pair)
        assert gap <= 2 * rounding, f"prompt {index}, token {place}: not a near tie"
    record_property("requests that differ from themselves alone", f"{len(found)} of 6")


@pytest.mark.parametrize("kind", ["qwen3", "gemma4_text"])
def test_the_same_batch_gives_the_same_text(kind: str, checkpoint: Callable[[str], str]) -> None:
    path = checkpoint(kind)
    runs = []
    for _ in range(2):
        with engine(path, dtype="bfloat16", max_num_seqs=3) as one:
            runs.append(one.tokens(prompts(6), greedy(COUNT)))
    assert runs[0] == runs[1]


def test_a_clear_difference_would_be_detected(checkpoint: Callable[[str], str]) -> None:
    """The bound is not so wide that any token passes."""
    path, prompt = checkpoint("qwen3"), prompts(6)[0]
    _, exact = models(path)
    with torch.inference_mode():
        order = exact(torch.tensor([prompt])).logits[0, -1].float().argsort(descending=True)
    gap, rounding = gap_and_rounding(path, prompt, int(order[0]), int(order[len(order) // 2]))
    assert gap > 2 * rounding
