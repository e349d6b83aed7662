"""The closed vocabulary of quire-tiny's world, and made-up names that are not in it.

Knows the lists of words.txt. Knows nothing of tasks.
"""

import random
from pathlib import Path


def _lists() -> dict[str, list[str]]:
    lines = Path(__file__).with_name("words.txt").read_text().splitlines()
    pairs = (line.split(": ") for line in lines if not line.startswith("#"))
    return {name: members.split() for name, members in pairs}


_LISTS = _lists()
GIRLS = _LISTS["girls"]
BOYS = _LISTS["boys"]
SURNAMES = _LISTS["surnames"]
CITIES = _LISTS["cities"]
JOBS = _LISTS["jobs"]
COLORS = _LISTS["colors"]
FOODS = _LISTS["foods"]
ITEMS = _LISTS["items"]
ANIMALS = _LISTS["animals"]
HEROES = _LISTS["heroes"]  # of stories only
PLACES = _LISTS["places"]
VERBS = _LISTS["verbs"]
ADJECTIVES = _LISTS["adjectives"]
MONTHS = _LISTS["months"]
DAYS = _LISTS["days"]
LANGUAGES = _LISTS["languages"]
SCENES = [p for p in PLACES if p not in ("station", "beach", "hill", "bridge")]
OUTDOORS = [p for p in SCENES if p not in ("kitchen", "school", "house", "library")]
HEROINES, FRIENDS = GIRLS[::2], GIRLS[1::2]  # of stories: no one is her own friend
SOLID = ["apple", "pear", "plum", "melon", "cookie", "banana", "peach", "cake", "pie"]
MASS = ["bread", "cake", "cheese", "soup", "rice", "honey", "pie", "fish", "corn", "salad"]
LAIRS = ["garden", "forest", "house", "barn", "meadow", "village", "cave", "tower"]
RESCUERS = ["basket", "boat", "ladder", "rope", "coat", "umbrella"]
NAMES = GIRLS + BOYS
SORTABLE = sorted({*COLORS, *FOODS, *ITEMS, *ANIMALS, *PLACES, *VERBS})

_ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "cr",
    "dr",
    "fl",
    "gr",
    "kl",
    "pr",
    "st",
    "tr",
    "sh",
    "ch",
    "th",
]
_VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "oo"]
_CODAS = ["b", "d", "g", "k", "l", "m", "n", "p", "r", "s", "t", "x", "nd", "rk", "st", "lm"] + [
    ""
] * 12


def made_up(rng: random.Random, low: int = 2, high: int = 3) -> str:
    """Return a pronounceable lower-case word of low to high syllables that need not exist."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.randint(low, high))
    )


def first_name(rng: random.Random) -> str:
    """Return a first name: mostly a known one, a made-up one in three of ten."""
    return rng.choice(NAMES) if rng.random() < 0.7 else made_up(rng).capitalize()


def full_name(rng: random.Random) -> str:
    """Return a first and a last name."""
    last = rng.choice(SURNAMES) if rng.random() < 0.7 else made_up(rng).capitalize()
    return f"{first_name(rng)} {last}"


def city(rng: random.Random) -> str:
    """Return a city: mostly a known one, a made-up one in four."""
    return rng.choice(CITIES) if rng.random() < 0.75 else made_up(rng).capitalize()


def code(rng: random.Random) -> str:
    """Return a number of two to five digits, or letters and digits mixed."""
    if rng.random() < 0.7:
        return str(rng.randint(10, 10 ** rng.randint(2, 5) - 1))
    letters = "abcdefghjkmnpqrstuvwxyz"
    return "".join(rng.choice(letters + "23456789") for _ in range(rng.randint(3, 6)))


def article(word: str) -> str:
    """Return "a" or "an" for the word."""
    return "an" if word[0] in "aeiou" else "a"


ODD_PLURALS = {"mouse": "mice", "wolf": "wolves", "sheep": "sheep", "deer": "deer", "fish": "fish"}


def plural(word: str) -> str:
    """Return the word for more than one."""
    if word in ODD_PLURALS:
        return ODD_PLURALS[word]
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh", "to")) else "s")


def eaten(word: str) -> str:
    """Return a food as one says that one likes it."""
    return word if word in (*MASS, "milk", "tea", "butter") else plural(word)


def typed(rng: random.Random, text: str) -> str:
    """Return the text as people type it: now and then without the capital, or without the mark at its end."""
    draw = rng.random()
    if draw < 0.08:
        return text[0].lower() + text[1:]
    if draw < 0.16:
        return text.rstrip(".?!")
    if draw < 0.24:
        return (text[0].lower() + text[1:]).rstrip(".?!")
    return text


def listing(words: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
