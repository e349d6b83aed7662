"""Every drafter that can serve quire-tiny, with its real weights: the text is that without it, and its tokens are often right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from equality.engines import Engine, engine
from tokenizers import Tokenizer

from quire.models.checkpoint_locator import EMBEDDED
from quire.protocol.sampling_params import SamplingParams
from tools.tiny_model import chat, corpus

MODEL = EMBEDDED / "quire-tiny"
FAMILIES = ("json", "tools", "sums", "retrieval", "repeat", "sort", "story_chat")
MOST = 3  # tokens of a draft
SETTINGS: dict[str, Any] = {"max_model_len": 1024, "dtype": "bfloat16"}
HEADS = {"eagle3": "quire-tiny-eagle3", "mtp": "quire-tiny-mtp"}


def params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=60, seed=3, stop_token_ids=[0, 2])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """One held-out prompt of each task, and a conversation whose last answer has the form of earlier ones."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    drawn = [next(corpus.samples(5, True, family, plain=True)) for family in FAMILIES]
    texts = [chat.prompt_of(sample) for sample in drawn]
    turns = []
    for sample, _ in zip(corpus.samples(6, True, "json", plain=True), range(3), strict=False):
        turns += [*sample.messages, {"role": "assistant", "content": sample.answer}]
    texts.append(chat.render(turns[:-1], add_generation_prompt=True))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[list[int]]]:
    with engine("quire-tiny", **SETTINGS) as plain:
        return answers(plain, prompts)


def answers(one: Engine, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Greedy, and drawn at temperature 1."""
    return [one.tokens(prompts, params(temperature)) for temperature in (0.0, 1.0)]


def said_by_card(folder: Path) -> float:
    """The mean share of accepted draft tokens over the tasks of a head's card."""
    tokens = re.findall(r"\| (\d\.\d+) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert len(tokens) == len(FAMILIES)
    return (sum(map(float, tokens)) / len(tokens) - 1) / MOST


FLOORS = {
    "ngram": 0.2,
    "suffix": 0.2,
    "draft_model": 0.4,
    **{method: None for method in HEADS},  # half of what its card says
}


@pytest.mark.parametrize("method", list(FLOORS))
def test_the_text_is_that_without_a_drafter_and_its_tokens_are_often_right(
    method: str, prompts: list[list[int]], expected: list[list[list[int]]]
) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": MOST, "adaptive": False}
    if method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with engine("quire-tiny", speculative_config=config, **SETTINGS) as one:
        assert answers(one, prompts) == expected
        counts = one.stats()["counts"]
    drafted = counts["spec_decode_num_draft_tokens"]
    floor = FLOORS[method]
    if floor is None:
        floor = said_by_card(EMBEDDED / HEADS[method]) / 2
    assert drafted > 50
    assert floor < counts["spec_decode_num_accepted_tokens"] / drafted < 1.0
