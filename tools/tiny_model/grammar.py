"""Tells whether a text is a story that the grammar could have written, every name and thing in agreement.

Knows how `stories.py` writes. Used to judge what the model tells.
"""

import re

from tools.tiny_model import stories, words

_DAYS = ["sunny day", "day", "morning"]
_SLOTS = {
    "n": words.NAMES,
    "m": words.FRIENDS,
    "k": [*words.ANIMALS, *words.HEROES, "girl", "boy"],
    "j": words.ANIMALS,
    "l": words.LAIRS,
    "s": words.RESCUERS,
    "q": words.SCENES,
    "r": words.OUTDOORS,
    "p2": words.OUTDOORS,
    "o": words.ITEMS,
    "i2": words.ITEMS,
    "d": words.ADJECTIVES[:18],
    "d2": words.ADJECTIVES[:18],
    "v": words.VERBS,
    "w": words.VERBS,
    "c": words.COLORS,
    "f": words.MASS,
    "g": words.SOLID,
    "day": _DAYS,
    "she": ["she"],
    "She": ["She"],
}
_SLOT = re.compile(r"\{(\w+)\}")


def hero_kind(text: str) -> str | None:
    """Return what the hero of a story is, or None if the grammar could not have written it."""
    for beats in stories.PLOTS.values():
        parts = [[f"{opening} " for opening in stories.OPENINGS], stories.HABITS, beats[0]]
        parts += [[f" {way}" for way in beat] for beat in beats[1:]]
        bound = _explain(text, [*parts, stories.ENDINGS], {})
        if bound and bound["n"] != bound.get("m"):
            return bound["k"]
    return None


def _explain(text: str, parts: list[list[str]], bound: dict[str, str]) -> dict[str, str] | None:
    """Return what the slots stand for when the text is one way of each part in turn."""
    if not parts:
        return bound if not text else None
    for way in parts[0]:
        found = re.match(_pattern(way, bound), text)
        if not found:
            continue
        more = bound | {slot: value for slot, value in found.groupdict().items() if value}
        if rest := _explain(text[found.end() :], parts[1:], more):
            return rest
    return None


def _pattern(way: str, bound: dict[str, str]) -> str:
    """Return a template as a regular expression: slots that are known stand for themselves."""
    known = dict(bound)
    if "n" in bound:
        her = bound["n"] in words.GIRLS
        known |= {"he": "she", "him": "her", "his": "her"} if her else {}
        known |= {"He": "She", "His": "Her"} if her else {}
    seen: set[str] = set()
    pieces = _SLOT.split(way)
    for at in range(1, len(pieces), 2):
        pieces[at] = _slot(pieces[at], known, seen)
    pieces[::2] = [re.escape(piece) for piece in pieces[::2]]
    return "".join(pieces)


def _slot(slot: str, known: dict[str, str], seen: set[str]) -> str:
    if slot in known:
        return re.escape(known[slot])
    if slot.startswith("a_"):
        return "an?"
    if slot not in _SLOTS:
        return slot  # he, him, his: of a boy
    if slot in seen:
        return f"(?P={slot})"
    seen.add(slot)
    return f"(?P<{slot}>{'|'.join(sorted(_SLOTS[slot], key=len, reverse=True))})"
