"""Prompts of the benchmark of speculation: texts that are quoted, edited, or have a form that repeats.

`copied` is for the copying model, which goes on as the text went on after the last token's earlier places.
`tasks` are conversations for quire-tiny, in the words of its own corpus (`tools/tiny_model`, so only in the repository).
"""

from __future__ import annotations

import importlib
import itertools
import random
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

COPIED = ("quoting", "editing", "json")
TASKS = ("quoting", "editing", "json")
LENGTH = 128


def copied(kind: str, vocabulary: int, many: int) -> list[list[int]]:
    """Token ids: a text of one of COPIED, and then its first tokens again.

    quoting: no token occurs twice, so the model quotes all of it. editing: lines of few identifiers, as in code; of
    what followed a token, the model says what is most frequent. json: records of the same keys, with other values.
    """
    rng = random.Random(f"{kind} {vocabulary}")
    return [_text(kind, rng, vocabulary) for _ in range(many)]


def _text(kind: str, rng: random.Random, vocabulary: int) -> list[int]:
    if kind == "quoting":
        text = rng.sample(range(vocabulary), LENGTH)
    elif kind == "editing":
        names, end = rng.sample(range(vocabulary), 48), rng.randrange(vocabulary)
        weights = [1 / place for place in range(1, len(names) + 1)]
        lines = [[*rng.choices(names, weights, k=7), end] for _ in range(LENGTH // 8)]
        text = [token for line in lines for token in line]
    else:
        form = rng.sample(range(vocabulary), 12)  # {, ", key, ":, ... of a record
        text = []
        for _ in range(LENGTH // 16):
            values = rng.sample(range(vocabulary), 4)
            for at in range(4):
                text += [*form[3 * at : 3 * at + 3], values[at]]
    return [*text, *text[:2]]


def tasks(kind: str, many: int) -> list[list[int]]:
    """Token ids of conversations.

    quoting: words to repeat. editing: a list to sort, and once more after it was sorted. json: a third sentence to turn into
    JSON, after two others, with the same keys.

    Raises:
        ConfigError: this is not the folder of the repository.
    """
    from tokenizers import Tokenizer

    from quire.models.location import EMBEDDED

    chat, corpus = _of_tiny("chat"), _of_tiny("corpus")
    tokenizer = Tokenizer.from_file(str(Path(EMBEDDED) / "quire-tiny" / "tokenizer.json"))
    family = {"quoting": "repeat", "editing": "sort", "json": "json"}[kind]
    drawn = corpus.samples(2, True, family, plain=True)
    found = []
    for _ in range(many):
        samples = [next(drawn)]
        if kind == "editing":
            samples *= 2
        elif kind == "json":
            same = (one for one in drawn if list(one.expected) == list(samples[0].expected))
            samples += itertools.islice(same, 2)
        messages: list[dict[str, Any]] = []
        for sample in samples:
            messages += [*sample.messages, {"role": "assistant", "content": sample.answer}]
        text = chat.render(messages[:-1], add_generation_prompt=True)
        found.append(tokenizer.encode(text, add_special_tokens=False).ids)
    return found


def _of_tiny(module: str) -> Any:
    try:
        return importlib.import_module(f"tools.tiny_model.{module}")
    except ImportError as why:
        raise ConfigError(f"the tasks are not there ({why}); run it in the repository") from why
