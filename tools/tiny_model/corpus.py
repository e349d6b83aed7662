"""The endless corpus: draws samples by family, keeps the held-out side apart, and puts tokens into batches.

Everything follows from a seed. Knows the families and their weights; knows nothing of the model.
"""

import random
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from tokenizers import Encoding, Tokenizer

from tools.tiny_model import (
    chat,
    extraction,
    facts,
    results,
    schema_requests,
    skills,
    stories,
    toolbox,
)
from tools.tiny_model.sample import Sample

# family: (how it is drawn, its share of the documents)
FAMILIES: dict[str, tuple[Callable[[random.Random], Sample], float]] = {
    "story": (stories.raw, 8),
    "story_chat": (stories.told, 11),
    "question": (stories.question, 4),
    "json": (extraction.to_json, 15),
    "tools": (toolbox.call, 12),
    "calls": (toolbox.calls, 5),
    "tool_result": (results.respond, 9),
    "repeat": (skills.repeat, 12),
    "sort": (skills.sort, 15),
    "sums": (skills.total, 14),
    "retrieval": (extraction.find, 11),
    "honest": (skills.honest, 5),
    "count": (skills.count, 8),
    "schema": (schema_requests.extract, 75),
    "schema_lists": (schema_requests.several, 10),
    "schema_tool": (schema_requests.call, 9),
    "invent": (schema_requests.invent, 14),
    "fact": (facts.fact, 14),
    "sentiment": (facts.sentiment, 3),
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
LONGEST = 1024  # tokens of a document
PROMPT_WEIGHT = 0.1  # of the loss on tokens that are given; answers count 1
STORY_WEIGHT = 0.4  # stories have no one right continuation: they would drown the rest


def samples(
    seed: int,
    held_out: bool,
    family: str | None = None,
    plain: bool = False,
    factors: Mapping[str, float] | None = None,
) -> Iterator[Sample]:
    """Yield samples without end from one side of the split.

    `plain` ones are not dressed; `factors` change the shares of families.
    """
    rng = random.Random(f"{seed} {held_out} {family}")
    names = [family] if family else list(FAMILIES)
    weights = [FAMILIES[name][1] * (factors or {}).get(name, 1.0) for name in names]

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
        if earlier.messages and not earlier.tools and not earlier.pieces and len(earlier.key) < 400:
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
    answer = tokenizer.encode(chat.answer_of(sample), add_special_tokens=False)
    weights = [PROMPT_WEIGHT] * len(prompt) + _answer_weights(sample, answer)
    if sample.every_turn:
        _weigh_answers(tokenizer, prompt, weights)
    weights[0] = 0.0  # nothing stands before it to predict it from
    return prompt + answer.ids, weights


def _answer_weights(sample: Sample, answer: Encoding) -> list[float]:
    """Return the weights of an answer's tokens: a token counts as the piece does that holds its last character."""
    weight = STORY_WEIGHT if sample.family.startswith("story") else 1.0
    if sample.pieces is None or chat.answer_of(sample).find(sample.answer) != 0:
        return [weight] * len(answer.ids)
    by_character = [loss for text, loss in sample.pieces for _ in text]
    ends = (end - 1 for _, end in answer.offsets)
    return [by_character[at] if at < len(by_character) else weight for at in ends]


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


def batches(
    tokenizer: Tokenizer,
    seed: int,
    tokens: int,
    change: Callable[[Sample], Sample] = lambda sample: sample,
    factors: Mapping[str, float] | None = None,
    spread: float = 1.3,
) -> Iterator[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Yield batches of some `tokens` tokens in parts: (tokens, loss weights, document numbers), one document a row, each [B, T].

    The documents of a part are of like length, so little is padding (document -1), and none sees another. One that is longer than
    LONGEST is left out. `change` is done to each sample before it is rendered. `spread`: of the lengths in a part, longest by shortest;
    a small batch wants a larger one, as each part costs a pass over all gradients.
    """
    drawn = samples(seed, held_out=False, factors=factors)
    while True:
        batch: list[tuple[list[int], list[float]]] = []
        while sum(len(ids) for ids, _ in batch) < tokens:
            document = encode(tokenizer, change(next(drawn)))
            if len(document[0]) <= LONGEST:
                batch.append(document)
        batch.sort(key=lambda document: len(document[0]))
        yield [
            _part(batch[begin:end]) for begin, end in _alike([len(ids) for ids, _ in batch], spread)
        ]


def _alike(lengths: list[int], spread: float) -> Iterator[tuple[int, int]]:
    """Yield ranges of the ascending lengths in which the longest is at most `spread` times the shortest, or 24 longer."""
    begin = 0
    for at, length in enumerate(lengths):
        if length > max(spread * lengths[begin], lengths[begin] + 24):
            yield begin, at
            begin = at
    yield begin, len(lengths)


def _part(
    documents: list[tuple[list[int], list[float]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return documents as padded rows."""
    shape = len(documents), len(documents[-1][0])
    tokens, numbers = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    weights = np.zeros(shape, np.float32)
    for row, (ids, loss) in enumerate(documents):
        tokens[row, : len(ids)], weights[row, : len(ids)], numbers[row, : len(ids)] = ids, loss, 0
    return tokens, weights, numbers
