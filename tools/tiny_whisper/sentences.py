"""The closed vocabulary of words.txt, and phrases of one to eight of its words.

A third of the phrases are words in any order: the model is to hear each word, and not to guess it from its neighbours.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from pathlib import Path

MOST_WORDS = 8
HELD_OUT = 16  # one phrase of this many is never trained on

KINDS: dict[str, list[str]] = {
    kind: words.split()
    for kind, _, words in (
        line.partition(": ") for line in Path(__file__).with_name("words.txt").read_text().splitlines()
    )
}  # fmt: skip
WORDS = sorted({word for words in KINDS.values() for word in words})
COMMANDS = (
    "verb the colour thing", "verb the thing in the place", "please verb my thing", "verb the adjective thing now",
    "lamp on", "music off", "digit colour animals", "the adjective animal act", "the colour animal act in the place",
    "the animal and the animal", "way and way", "digit thing way", "verb the thing when", "hello my adjective animal",
    "the thing is colour", "no verb the thing on the way", "yes please", "my animal is in the place", "verb digit animals with the thing",
)  # fmt: skip


def is_held_out(phrase: str) -> bool:
    """Whether this phrase, of any voice, is kept for measuring."""
    return blake2b(phrase.encode(), digest_size=4).digest()[0] % HELD_OUT == 0


def phrase(draw: random.Random) -> str:
    """Draw a phrase: digits, a number, a sentence, or words in any order."""
    family = draw.choices(("digits", "number", "sentence", "any"), (3, 2, 4, 4))[0]
    if family == "digits":
        words = draw.choices(KINDS["digit"], k=draw.randint(1, MOST_WORDS))
    elif family == "number":
        words = number(draw).split()
    elif family == "sentence":
        words = [draw.choice(KINDS.get(word, [word])) for word in draw.choice(COMMANDS).split()]
    else:
        words = draw.choices(WORDS, k=draw.choice((1, 1, 2, 3, 4, 5, 6, 7, 8)))
    return " ".join(words[:MOST_WORDS])


def number(draw: random.Random) -> str:
    """A number in words, below a million, as it is said; sometimes of things."""
    tens = [*KINDS["teen"], *(f"{ten} {digit}" for ten in KINDS["ten"] for digit in KINDS["digit"][1:]), *KINDS["ten"]]  # fmt: skip
    said = draw.choice(tens)
    if draw.random() < 0.4:
        hundreds = f"{draw.choice(KINDS['digit'][1:])} {draw.choice(KINDS['large'])}"
        said = draw.choice((f"{hundreds} {said}", hundreds))
    if draw.random() < 0.3:
        said = f"{said} {draw.choice(KINDS['animals'])}"
    return said
