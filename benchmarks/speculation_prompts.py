"""Prompts of the benchmark of speculation: texts that are quoted, edited, or have a form that repeats.

`texts` are for a model that writes the answer which its prompt names (`speculation_models.transcribing`). They split into about the
tokens of a trained tokenizer: words with the space before them, digits, signs. `tasks` are conversations for quire-tiny, in the words of
its own corpus (`tools/tiny_model`, so only in the repository).
"""

from __future__ import annotations

import importlib
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

TASKS = ("quoting", "editing", "json")
SOURCE = 128
"""Tokens of an answer."""
_TOKEN = re.compile(r"\n *| ?[A-Za-z_]+| ?\d| ?[^\w\s]")
_NOUNS = "user order item page token block queue report invoice account session record".split()
_FIELDS = "name size total state owner price limit offset label index".split()
_VERBS = "load save parse find merge split check count fetch apply".split()
_NAMES = "Ada Alan Grace Edsger Barbara Donald Tony Niklaus John Dennis Ken Brian Leslie Robin".split()  # fmt: skip
_CITIES = "London Paris Oslo Lima Cairo Delhi Kyoto Turin Porto Quito Accra Dakar Hanoi Sofia".split()  # fmt: skip


def texts(kind: str, vocabulary: int, many: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and their answers of SOURCE tokens, with ids below `vocabulary`.

    quoting: a paragraph, word for word. editing: a class, with a field of another name and a line more. json: a table, as
    records of the same keys.
    """
    rng = random.Random(f"{kind} {vocabulary}")
    ids = iter(rng.sample(range(vocabulary), min(vocabulary, 4096)))
    known: dict[str, int] = {}

    def encoded(text: str) -> list[int]:
        words = _TOKEN.findall(text)
        for word in words:
            if word not in known:
                known[word] = next(ids)
        return [known[word] for word in words]

    drawn = (_TEXTS[kind](rng) for _ in range(many))
    return [(encoded(prompt), encoded(answer)[:SOURCE]) for prompt, answer in drawn]


def _quoting(rng: random.Random) -> tuple[str, str]:
    words = [*_NOUNS, *_FIELDS, *_VERBS]
    sentences = ["The " + " ".join(rng.choices(words, k=9)) + "." for _ in range(12)]
    return " ".join(sentences) + "\nRepeat this.\n", " ".join(sentences)


def _editing(rng: random.Random) -> tuple[str, str]:
    noun, (first, second) = rng.choice(_NOUNS), rng.sample(_VERBS, 2)
    key, other, new, *kept = rng.sample(_FIELDS, 6)
    before = f"""class Store:
    def __init__(self, {", ".join(kept)}):
        self.{kept[0]} = {kept[0]}
        self.{kept[1]} = {kept[1]}
        self.{noun}s = {{}}
    def {first}(self, {noun}):
        if {noun}.{key} in self.{noun}s:
            raise KeyError({noun}.{key})
        self.{noun}s[{noun}.{key}] = {noun}
        return self.{noun}s
    def {second}(self, {other}):
        return [{noun} for {noun} in self.{noun}s.values() if {noun}.{other} == {other}]
    def clear(self):
        self.{noun}s = {{}}
        self.{kept[2]} = {kept[2]}
"""
    after = before.replace(key, new).replace("        return self", f"        log({first}, {noun})\n        return self")  # fmt: skip
    return f"{before}Rename {key} to {new} and log each {first}.\n", after


def _json(rng: random.Random) -> tuple[str, str]:
    drawn = zip(rng.sample(_NAMES, 6), rng.sample(_CITIES, 6), strict=True)
    rows = [(name, rng.randrange(18, 90), city, rng.choice(["true", "false"])) for name, city in drawn]  # fmt: skip
    table = "\n".join(f"{name}, {age}, {city}, {member}" for name, age, city, member in rows)
    first, *others = (
        f'{{"name": "{name}", "age": {age}, "city": "{city}", "member": {member}}}'
        for name, age, city, member in rows
    )
    return f"{table}\nAs JSON:\n[{first},\n ", ",\n ".join(others) + "]"


_TEXTS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "quoting": _quoting, "editing": _editing, "json": _json,
}  # fmt: skip


def transcribed(kind: str, vocabulary: int, many: int) -> list[list[int]]:
    """Prompts whose last SOURCE tokens name a transcribing model's answer, in ids of the upper half of the vocabulary."""
    half = vocabulary // 2
    return [prompt + [half + token for token in answer] for prompt, answer in texts(kind, half, many)]  # fmt: skip


def tasks(kind: str, many: int) -> list[list[int]]:
    """Token ids of conversations.

    quoting: words to repeat. editing: a list to sort, and once more after it was sorted. json: a third sentence to turn into
    JSON, after two others, with the same keys.

    Raises:
        ConfigError: this is not the folder of the repository.
    """
    from tokenizers import Tokenizer

    from quire.models.checkpoint_locator import EMBEDDED

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
