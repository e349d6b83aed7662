"""Who says the phrases, and how: the voices, speeds and pitches that are trained on, and others that are kept for measuring."""

from __future__ import annotations

import random

from tools.tiny_whisper.espeak import Manner

ACCENTS = ("en-us", "en-us", "en", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-us-nyc")
VARIANTS = (
    "", "f1", "f2", "f4", "f5", "m1", "m2", "m3", "m5", "m6", "m8", "klatt", "klatt2", "klatt4", "klatt5", "Alex", "Alicia",
    "Andrea", "Andy", "Denis", "Diogo", "Gene", "Gene2", "Hugo", "Jacky", "Lee", "Marco", "Mario", "Mike", "RicishayMax",
    "RicishayMax3", "Storm", "Tweaky", "adam", "anika", "aunty", "benjamin", "boris", "caleb", "croak", "ed", "edward", "grandma",
    "iven", "iven3", "kaukovalta", "linda", "marcelo", "max", "michel", "norbert", "pablo", "paul", "quincy", "rob", "robosoft",
    "robosoft3", "robosoft5", "sandro", "steph", "steph2", "travis", "zac",
)  # fmt: skip
OTHER_ACCENTS = ("en-us", "en", "en-gb-x-gbcwmd")
OTHER_VARIANTS = (
    "f3", "m4", "m7", "klatt3", "Annie", "Henrique", "Michael", "Nguyen", "RicishayMax2", "antonio", "belinda", "david", "edward2",
    "grandpa", "gustave", "iven2", "john", "miguel", "pedro", "robert", "robosoft2", "shelby", "steph3", "victor",
)  # fmt: skip
"""Voices that no training phrase has, in any accent."""

SPEEDS = (*range(105, 146), *range(166, 216))  # words a minute
OTHER_SPEEDS = tuple(range(146, 166))


def manner(draw: random.Random, held_out: bool) -> Manner:
    """Draw how a phrase is said. `held_out`: by a voice and at a speed that are never trained on."""
    accents, variants, speeds = (
        (OTHER_ACCENTS, OTHER_VARIANTS, OTHER_SPEEDS) if held_out else (ACCENTS, VARIANTS, SPEEDS)
    )
    variant = draw.choice(variants)
    return Manner(
        draw.choice(accents) + (f"+{variant}" if variant else ""),
        draw.choice(speeds),
        min(99, max(0, round(draw.gauss(50, 18)))),
        draw.randint(20, 80),
        draw.choice((0, 0, 0, 2, 5, 10, 20)),
    )
