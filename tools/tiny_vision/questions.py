"""Questions about scenes, in a closed list of forms and wordings, with their one right answer.

Knows scenes and English. Knows nothing of pixels or tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import NamedTuple

from tools.tiny_vision.scenes import COLOURS, SHAPES, Scene, Thing


class Question(NamedTuple):
    """`kind`: of KINDS."""

    kind: str
    text: str
    answer: str


# A picture alone is a question, too.
DESCRIBE = (
    "What is in this picture?", "What is in the picture?", "What's in this picture?", "What do you see?", "Describe this picture.",
    "Describe the picture.", "What is in this image?", "Describe this image.", "What can you see in this picture?", "",
)  # fmt: skip
NUMBER = ("What number is shown?", "Which number is in the picture?", "What number is in this picture?", "Read the number.", "What is the number?")  # fmt: skip
COUNT = ("How many {what} are there?", "How many {what} are in the picture?", "How many {what} do you see?", "How many {what} can you see?")  # fmt: skip
COLOUR = ("What colour is the {what}?", "What color is the {what}?", "Which colour does the {what} have?")  # fmt: skip
WHERE = ("Where is the {what}?", "Where in the picture is the {what}?")
SIDE = ("What is {side} of the {what}?", "What is to the {side} of the {what}?")
AS_JSON = ("Describe this picture as JSON.", "Describe the picture as JSON.", "What is in this picture? Answer as JSON.")  # fmt: skip
LONG = 0.3  # share of the pictures that may be asked for as JSON: these answers are as long as five others
CLEAR = 0.04  # of the side, between the centre of a thing that is asked for and the next third


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def named(thing: Thing) -> str:
    """red circle"""
    return f"{thing.colour} {thing.kind}"


def listed(things: list[Thing]) -> str:
    """A red circle, a blue square and a black 7."""
    names = [f"{article(one.colour)} {named(one)}" for one in things]
    text = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
    return f"{text[0].upper()}{text[1:]}."


def describe(scene: Scene, rng: random.Random) -> Question:
    return Question("describe", rng.choice(DESCRIBE), listed(list(scene.things)))


def count(scene: Scene, rng: random.Random) -> Question:
    """How many shapes the scene has: all, all of one kind, or all of one colour."""
    if rng.random() < 0.4:
        what, found = "shape", scene.shapes
    elif rng.random() < 0.6:
        what = rng.choice([one.kind for one in scene.shapes] * 2 + list(SHAPES))
        found = [one for one in scene.shapes if one.kind == what]
    else:
        return count_of_colour(scene, rng)
    return _counted(what, found, rng)


def count_of_colour(scene: Scene, rng: random.Random) -> Question:
    colour = rng.choice([one.colour for one in scene.shapes] * 3 + list(COLOURS))
    found = [one for one in scene.shapes if one.colour == colour]
    return _counted(f"{colour} shape", found, rng)


def _counted(what: str, found: list[Thing], rng: random.Random) -> Question:
    answer = (
        f"There is 1 {what}." if len(found) == 1 else f"There are {len(found) or 'no'} {what}s."
    )
    return Question("count", rng.choice(COUNT).format(what=f"{what}s"), answer)


def colour(scene: Scene, rng: random.Random) -> Question | None:
    """Of the one thing of its kind."""
    kinds = ["number" if one.is_number else one.kind for one in scene.things]
    alone = [(kind, one) for kind, one in zip(kinds, scene.things, strict=True) if kinds.count(kind) == 1]  # fmt: skip
    if not alone:
        return None
    kind, thing = rng.choice(alone)
    return Question("colour", rng.choice(COLOUR).format(what=kind), f"It is {thing.colour}.")


def only_ones(scene: Scene) -> list[Thing]:
    """Things whose colour and kind no other has."""
    names = [named(one) for one in scene.things]
    return [one for one in scene.things if names.count(named(one)) == 1]


def third(at: float) -> int | None:
    """0, 1 or 2; None: between two."""
    if min(abs(at - 1 / 3), abs(at - 2 / 3)) < CLEAR:
        return None
    return int(at * 3)


def place(thing: Thing) -> str:
    """top left, top, ..., middle; empty: between two places."""
    column, row = third(thing.x), third(thing.y)
    if column is None or row is None:
        return ""
    words = (("top", "", "bottom")[row], ("left", "", "right")[column])
    return " ".join(word for word in words if word) or "middle"


def where(scene: Scene, rng: random.Random) -> Question | None:
    clear = [one for one in only_ones(scene) if place(one)]
    if not clear:
        return None
    thing = rng.choice(clear)
    at = place(thing)
    answer = f"It is {'in' if at == 'middle' else 'at'} the {at}."
    return Question("where", rng.choice(WHERE).format(what=named(thing)), answer)


def beside(scene: Scene, rng: random.Random) -> Question | None:
    """The next thing to the left or right, in the order of the centres."""
    alone = only_ones(scene)
    if not alone:
        return None
    thing, side = rng.choice(alone), rng.choice(("left", "right"))
    at = scene.things.index(thing) + (1 if side == "right" else -1)
    answer = listed([scene.things[at]]) if 0 <= at < len(scene.things) else "Nothing."
    return Question("beside", rng.choice(SIDE).format(side=side, what=named(thing)), answer)


def number(scene: Scene, rng: random.Random) -> Question | None:
    if scene.number is None:
        if rng.random() < 0.8:
            return None
        return Question("number", rng.choice(NUMBER), "There is no number.")
    return Question("number", rng.choice(NUMBER), f"The number is {scene.number.kind}.")


def as_json(scene: Scene, rng: random.Random) -> Question:
    things = [
        {"color": one.colour, **({"number": int(one.kind)} if one.is_number else {"shape": one.kind})}
        for one in scene.things
    ]  # fmt: skip
    return Question("json", rng.choice(AS_JSON), json.dumps({"things": things}))


KINDS: dict[str, tuple[Callable[[Scene, random.Random], Question | None], float]] = {
    "describe": (describe, 0.5), "count": (count, 1.5), "colour": (colour, 2.5), "where": (where, 2.5), "beside": (beside, 6.5),
    "number": (number, 0.5), "json": (as_json, 3),
}  # fmt: skip
"""kind: (how it is asked, its share)"""
HARD = {"count of colour": (count_of_colour, 1.5)}  # asked in training besides
ONCE = ("describe", "number", "json")


def questions(scene: Scene, rng: random.Random, many: int) -> list[Question]:
    """`many` different questions, as far as there are; those about the whole picture once."""
    left, found, seen = {**KINDS, **HARD}, list[Question](), set[str]()
    if rng.random() > LONG:
        del left["json"]
    for _ in range(3 * many):
        if len(found) == many:
            break
        kind = rng.choices(list(left), [share for _, share in left.values()])[0]
        asked = left[kind][0](scene, rng)
        if kind in ONCE:
            del left[kind]
        if asked is not None and asked.text not in seen:
            found.append(asked)
            seen.add(asked.text)
    return found
