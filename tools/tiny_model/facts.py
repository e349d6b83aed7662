"""Short facts of a chat, and words judged as good or bad: what facts.txt says, in several wordings."""

import random
from pathlib import Path

from tools.tiny_model import words
from tools.tiny_model.sample import Sample, ask


def _lines() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("facts.txt").read_text().splitlines():
        if not line.startswith("#"):
            kind, rest = line.split(": ", 1)
            found.setdefault(kind, []).append(rest)
    return found


_LINES = _lines()
COUNTRY_FACTS = [tuple(line.split()) for line in _LINES["country"]]
_PAIRS = {kind: [tuple(line.split()) for line in _LINES[kind]] for kind in ("opposite", "sound", "color")}  # fmt: skip
_TOLD = [tuple(line.split(" = ")) for line in _LINES["fact"]]
_LEGS = [(animal, line.split()[0]) for line in _LINES["legs"] for animal in line.split()[1:]]
POSITIVE = "wonderful great good amazing nice perfect excellent beautiful fantastic lovely".split()
NEGATIVE = "terrible bad awful boring ugly broken horrible poor slow sad".split()
JUDGED = ["The {t} is {w}.", "This {t} is {w}!", "What a {w} {t}!", "I think the {t} is {w}.", "{n} is {w}!", "The {t} was {w}."]  # fmt: skip
LIKED = (
    ["I love this {t}.", "I like this {t} very much."],
    ["I hate this {t}.", "I do not like this {t}."],
)
JUDGE = [
    "Classify this sentiment: {x}",
    "Classify the sentiment: {x}",
    "Is this review positive or negative? {x}",
    "What is the sentiment of this text? {x}",
    "Sentiment: {x}",
    "Positive or negative? {x}",
    '"{x}" Is this positive or negative?',
]


def judged(rng: random.Random) -> tuple[str, str]:
    """Return a sentence and whether it is positive or negative."""
    good = rng.random() < 0.5
    forms = JUDGED if rng.random() < 0.75 else LIKED[0 if good else 1]
    thing = rng.choice([*words.ITEMS, "film", "food", "service", "story", "engine", "model", "day"])
    word = rng.choice(POSITIVE if good else NEGATIVE)
    name = rng.choice(["Quire", "vLLM", "It", words.first_name(rng)])
    return rng.choice(forms).format(t=thing, w=word, n=name), "positive" if good else "negative"


def sentiment(rng: random.Random) -> Sample:
    """A sentence to be called positive or negative."""
    text, answer = judged(rng)
    request = rng.choice(JUDGE).format(x=text)
    return Sample("sentiment", answer, key=text, messages=ask(request), expected=answer)


def _question(rng: random.Random) -> tuple[list[str], str]:
    draw = rng.random()
    if draw < 0.3:
        name, capital, tongue = rng.choice(COUNTRY_FACTS)
        if rng.random() < 0.75:
            return [f"What is the capital of {name}?", f"What is {name}'s capital?", f"Which city is the capital of {name}?", f"Tell me the capital of {name}.", f"Capital of {name}?", f"What's the capital of {name}?"], f"The capital of {name} is {capital}."  # fmt: skip
        return [f"Which language is spoken in {name}?", f"What language do people speak in {name}?"], f"People in {name} speak {tongue}."  # fmt: skip
    if draw < 0.38:
        one, other = rng.choice(_PAIRS["opposite"])
        if rng.random() < 0.5:
            one, other = other, one
        return [f"What is the opposite of {one}?", f"Opposite of {one}?", f"What's the opposite of {one}?"], f"The opposite of {one} is {other}."  # fmt: skip
    if draw < 0.45:
        animal, legs = rng.choice(_LEGS)
        return [f"How many legs does {words.article(animal)} {animal} have?", f"How many legs has {words.article(animal)} {animal}?"], f"{words.article(animal).capitalize()} {animal} has {legs} legs."  # fmt: skip
    if draw < 0.5:
        animal, sound = rng.choice(_PAIRS["sound"])
        return [f"What does {words.article(animal)} {animal} say?", f"What sound does {words.article(animal)} {animal} make?"], f"{words.article(animal).capitalize()} {animal} says {sound}."  # fmt: skip
    if draw < 0.56:
        thing, color = rng.choice(_PAIRS["color"])
        return [f"What color is the {thing}?", f"What is the color of the {thing}?", f"Which color does the {thing} have?"], f"The {thing} is {color}."  # fmt: skip
    if draw < 0.62:
        turn, at = rng.choice([(words.DAYS, rng.randrange(7)), (words.MONTHS, rng.randrange(12))])
        this, after = turn[at], turn[(at + 1) % len(turn)]
        if rng.random() < 0.5:
            return [f"What comes after {this}?", f"Which {'day' if len(turn) == 7 else 'month'} comes after {this}?"], f"{after} comes after {this}."  # fmt: skip
        return [f"What comes before {after}?", f"Which {'day' if len(turn) == 7 else 'month'} comes before {after}?"], f"{this} comes before {after}."  # fmt: skip
    asked, told = rng.choice(_TOLD)
    return [f"{question}?" for question in asked.split(" / ")], told


def fact(rng: random.Random) -> Sample:
    """A question about the small table of facts; held out are wordings, for a fact that was never told cannot be known."""
    asked, answer = _question(rng)
    request = words.typed(rng, rng.choice(asked))
    if request.startswith("Say "):
        request = request.rstrip("?") + "."
    return Sample("fact", answer, key=request, messages=ask(request), expected=answer)
