"""The endless corpus: draws samples by family, keeps the held-out side apart, and packs tokens into rows.

Everything follows from a seed. Knows the families and their weights; knows nothing of the model.
"""

import random
from collections.abc import Callable, Iterator

import numpy as np
from tokenizers import Tokenizer

from tools.tiny_model import chat, extraction, skills, stories, toolbox
from tools.tiny_model.sample import Sample

# family: (how it is drawn, its share of the documents)
FAMILIES: dict[str, tuple[Callable[[random.Random], Sample], float]] = {
    "story": (stories.raw, 8),
    "story_chat": (stories.told, 7),
    "question": (stories.question, 4),
    "json": (extraction.to_json, 15),
    "tools": (toolbox.call, 14),
    "tool_result": (toolbox.respond, 3),
    "repeat": (skills.repeat, 12),
    "sort": (skills.sort, 22),
    "sums": (skills.total, 14),
    "retrieval": (extraction.find, 13),
    "honest": (skills.honest, 5),
    "count": (skills.count, 8),
}
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are quire-tiny.",
    "Answer shortly.",
    "Be kind and honest.",
]
TALK = (
    "honest",
    "story_chat",
    "repeat",
    "sort",
    "count",
    "json",
)  # needs no function that may be there
PROMPT_WEIGHT = 0.1  # of the loss on tokens that are given; answers count 1
STORY_WEIGHT = 0.4  # stories have no one right continuation: they would drown the rest


def samples(
    seed: int, held_out: bool, family: str | None = None, plain: bool = False
) -> Iterator[Sample]:
    """Yield samples without end from one side of the split; `plain` ones are not dressed."""
    rng = random.Random(f"{seed} {held_out} {family}")
    names = [family] if family else list(FAMILIES)
    weights = [FAMILIES[name][1] for name in names]

    def draw() -> Sample:
        while True:
            sample = FAMILIES[rng.choices(names, weights)[0]][0](rng)
            if sample.held_out == held_out:
                return sample

    while True:
        sample = draw()
        yield sample if plain else dress(rng, sample, draw)


def dress(rng: random.Random, sample: Sample, draw: Callable[[], Sample]) -> Sample:
    """Return the sample as clients send such things: with a system prompt, an earlier turn, or thinking turned off."""
    if not sample.messages:
        return sample
    if sample.family != "sums" and rng.random() < 0.05:  # sums are answered otherwise then
        sample.thinking = False
    if not sample.tools and rng.random() < 0.12:
        earlier = draw()
        if earlier.messages and not earlier.tools and len(earlier.key) < 400:
            answer = {"role": "assistant", "content": earlier.answer}
            sample.messages = [*earlier.messages, answer, *sample.messages]
            # The thought of an earlier sum is not shown: its answer alone would teach to do without.
            sample.every_turn = earlier.family != "sums" and sample.family != "sums"
    talk = sample.family in TALK and (sample.family != "honest" or not sample.key)
    if talk and not sample.tools and rng.random() < 0.08:
        sample.tools = toolbox.some(rng)
    if sample.messages[0]["role"] != "system" and rng.random() < 0.12:
        sample.messages = [{"role": "system", "content": rng.choice(SYSTEMS)}, *sample.messages]
    return sample


def texts(seed: int, many: int) -> Iterator[str]:
    """Yield the text of training documents, for the tokenizer."""
    for _, sample in zip(range(many), samples(seed, held_out=False), strict=False):
        yield chat.prompt_of(sample) + chat.answer_of(sample)


def encode(tokenizer: Tokenizer, sample: Sample) -> tuple[list[int], list[float]]:
    """Return the tokens of a sample, and the weight of each in the loss when it is predicted."""
    prompt = tokenizer.encode(chat.prompt_of(sample), add_special_tokens=False).ids
    answer = tokenizer.encode(chat.answer_of(sample), add_special_tokens=False).ids
    weight = STORY_WEIGHT if sample.family.startswith("story") else 1.0
    weights = [PROMPT_WEIGHT] * len(prompt) + [weight] * len(answer)
    if sample.every_turn:
        _weigh_answers(tokenizer, prompt, weights)
    weights[0] = 0.0  # nothing stands before it to predict it from
    return prompt + answer, weights


def _weigh_answers(tokenizer: Tokenizer, ids: list[int], weights: list[float]) -> None:
    """Give the answers in a prompt, each up to and with the end of its turn, the full weight."""
    head = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    end = tokenizer.token_to_id(chat.END_OF_TURN)
    at = 0
    while at < len(ids):
        if ids[at : at + len(head)] != head:
            at += 1
            continue
        at += len(head)
        while at < len(ids) and ids[at - 1] != end:
            weights[at] = 1.0
            at += 1


def rows(
    tokenizer: Tokenizer,
    seed: int,
    length: int,
    change: Callable[[Sample], Sample] = lambda sample: sample,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield rows of `length` + 1 tokens: (tokens, weights, document numbers), whole documents, padded with document -1.

    A document longer than a row is left out. `change` is done to each sample before it is rendered.
    """
    waiting: list[tuple[list[int], list[float]]] = []
    for sample in samples(seed, held_out=False):
        waiting.append(encode(tokenizer, change(sample)))
        if len(waiting) < 48:
            continue
        tokens = np.zeros(length + 1, np.int64)
        weights = np.zeros(length + 1, np.float32)
        numbers = np.full(length + 1, -1, np.int64)
        at = number = 0
        kept = []
        for ids, loss in waiting:  # first fit: what does not fit waits for the next row
            if at + len(ids) <= length + 1:
                tokens[at : at + len(ids)] = ids
                weights[at : at + len(ids)] = loss
                numbers[at : at + len(ids)] = number
                at, number = at + len(ids), number + 1
            elif len(ids) <= length + 1:
                kept.append((ids, loss))
        waiting = kept
        yield tokens, weights, numbers
