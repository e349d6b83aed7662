"""Pairs of texts that say the same in other words: one story told twice, with the same people, things and places.

Knows the grammar of stories. Used to train and to measure vectors.
"""

import random

from tools.tiny_model import stories
from tools.tiny_model.sample import Sample


def _ways(rng: random.Random, beats: list[list[str]]) -> tuple[list[str], list[str]]:
    """Return two ways to say each beat, different ones."""
    pairs = [rng.sample(beat, 2) if len(beat) > 1 else beat * 2 for beat in beats]
    return [one for one, _ in pairs], [other for _, other in pairs]


def pair(rng: random.Random) -> tuple[str, str, str]:
    """Return two tellings of one story, and a key that names the story."""
    facts = stories.world(rng)
    plot = rng.choice(list(stories.PLOTS))
    first, second = _ways(
        rng, [stories.OPENINGS, stories.HABITS, *stories.PLOTS[plot], stories.ENDINGS]
    )
    return _told(first, facts), _told(second, facts), " ".join([plot, *facts.values()])


def _told(ways: list[str], facts: dict[str, str]) -> str:
    opening, habit, *beats, ending = ways
    return (opening + " " + habit + " ".join(beats) + ending).format(**facts)


def pairs(seed: int, count: int, published: bool) -> list[tuple[str, str]]:
    """Return `count` pairs: of stories that are never trained on (`published`), or of the others."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        first, second, story = pair(rng)
        if Sample("paraphrase", "", key=story).held_out == published:
            found.append((first, second))
    return found
