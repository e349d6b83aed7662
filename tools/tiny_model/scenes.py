"""Sentences with facts in them, for requests that ask for an object by a schema.

A scene is a sentence of scenes.txt whose slots are drawn; each slot becomes a `Field` with the names that a schema may give it.
Knows nothing of prompts, JSON or schemas.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from tools.tiny_model import extraction, words

COUNTRIES = (
    "France Germany Italy Spain Norway Sweden Denmark Finland Poland Greece Japan Canada Brazil"
)
EVENTS = (
    "science fair,birthday party,concert,meeting,team meeting,dinner,picnic,wedding,workshop,party,lunch,conference,"
    "football game,dance class,book club,piano lesson,garden party,board game night,movie night,dentist appointment,"
    "job interview,tea party,school play,boat race,flower show,music festival,yoga class,breakfast,call,trip"
).split(",")
DISHES = (
    "pancakes,apple pie,tomato soup,lasagna,pizza,onion soup,fruit salad,banana bread,chocolate cake,fish soup,"
    "potato salad,lemon cake,honey bread,carrot soup,cheese cake,bean stew,corn bread,rice pudding,omelette,pasta,cookies,"
    "spaghetti,curry,porridge,sandwich,muffins"
).split(",")
PANTRY = [*words.MASS, "flour", "sugar", "salt", "water", "oil", "butter", "milk", "eggs", "pepper", "cream", "garlic"]  # fmt: skip
CONDITIONS = "sunny cloudy rainy windy foggy snowy stormy cold warm hot".split()
PLANS = "free basic plus pro team business enterprise premium".split()
STAY = 0.62  # of the fields of a sentence, when a schema asks for only some


@dataclass(frozen=True)
class Field:
    """A fact: the names that a schema may give it, its value, the values that a schema lists, and its type if the value does not tell."""

    names: tuple[str, ...]
    value: Any
    options: tuple[str, ...] = ()
    kind: str = ""


Drawn = tuple[str, Any]  # as the sentence says it, as the object has it
Draw = Callable[[random.Random], Drawn]


def _same(draw: Callable[[random.Random], Any]) -> Draw:
    def both(rng: random.Random) -> Drawn:
        value = draw(rng)
        return str(value), value

    return both


def _pick(values: list[str]) -> Draw:
    return _same(lambda rng: rng.choice(values))


def _number(low: int, high: int) -> Draw:
    return _same(lambda rng: rng.randint(low, high))


def _person(rng: random.Random) -> str:
    return words.first_name(rng) if rng.random() < 0.5 else words.full_name(rng)


def _listed(draw: Callable[[random.Random], str], low: int, high: int) -> Draw:
    def both(rng: random.Random) -> Drawn:
        chosen = list(dict.fromkeys(draw(rng) for _ in range(rng.randint(low, high))))
        return words.listing(chosen), chosen

    return both


def _date(rng: random.Random) -> Drawn:
    day, month = rng.randint(1, 28), rng.choice(words.MONTHS)
    iso = f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{day:02}"
    told = rng.choice([f"{day} {month}", f"{month} {day}", iso])
    return told, told


def _price(rng: random.Random) -> Drawn:
    value = rng.choice([rng.randint(1, 200), round(rng.randint(100, 9999) / 100, 2)])
    return str(value), value


def _goods(rng: random.Random) -> Drawn:
    told, found = [], []
    many = rng.randint(1, 4)
    things = rng.sample([*words.ITEMS, *words.SOLID, *words.ANIMALS[:12]], many)
    for thing in things:
        count = 1 if rng.random() < 0.25 else rng.randint(2, 30)
        name = thing if count == 1 else words.plural(thing)
        told.append(f"{words.article(thing)} {name}" if count == 1 else f"{count} {name}")
        found.append((name, count))
    return words.listing(told), found


def _title(rng: random.Random) -> str:
    nouns = rng.sample([*words.ITEMS, *words.ANIMALS, *words.PLACES], 2)
    forms = ["The {d} {a}", "The {a} of the {b}", "The {a} and the {b}", "{d} {a}", "The {a}"]
    told = rng.choice(forms).format(a=nouns[0], b=nouns[1], d=rng.choice(words.ADJECTIVES))
    return " ".join(w if w in ("of", "the", "and") else w.capitalize() for w in told.split(" "))


def _company(rng: random.Random) -> str:
    made = words.made_up(rng).capitalize() if rng.random() < 0.5 else rng.choice(words.SURNAMES)
    return f"{made} {rng.choice(['Foods', 'Motors', 'Books', 'Labs', 'Systems', 'Toys', 'Travel'])}"


def _phone(rng: random.Random) -> str:
    return f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


def _clock(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return f"{rng.randint(1, 12)} {rng.choice(['am', 'pm'])}"


def _stock(form: tuple[str, str]) -> Draw:
    def both(rng: random.Random) -> Drawn:
        there = rng.random() < 0.5
        return form[0 if there else 1], there

    return both


def _tag(rng: random.Random) -> str:
    return rng.choice([*words.VERBS, *words.ITEMS, *words.ADJECTIVES])


# slot: (the names that a schema may give it, how it is drawn)
SLOTS: dict[str, tuple[str, Draw]] = {
    "name": ("name full_name person user_name customer", _same(_person)),
    "friend": ("friend friend_name best_friend", _same(words.first_name)),
    "pet": ("name animal_name pet_name called", _same(words.first_name)),
    "age": ("age years age_in_years", _number(1, 99)),
    "city": ("city town location place home", _same(words.city)),
    "country": ("country nation land", _pick(COUNTRIES.split())),
    "job": ("job occupation profession role work", _pick(words.JOBS)),
    "email": ("email email_address mail address contact", _same(extraction.email)),
    "color": ("color colour favorite_color", _pick(words.COLORS)),
    "food": ("food favorite_food likes meal", _same(lambda r: words.eaten(r.choice(words.FOODS)))),
    "language": ("language speaks tongue", _pick(words.LANGUAGES)),
    "year": ("year founded birth_year date", _number(1900, 2039)),
    "animal": ("kind animal species type", _pick(words.ANIMALS)),
    "place": ("place location where", _pick(words.PLACES)),
    "people": ("participants people attendees guests names", _listed(words.first_name, 2, 4)),
    "event": ("name title event event_name summary", _pick(EVENTS)),
    "day": ("day date when weekday", _pick(words.DAYS)),
    "date": ("date day when", _date),
    "time": ("time start start_time at hour", _same(_clock)),
    "condition": ("condition weather sky conditions description", _pick(CONDITIONS)),
    "degrees": ("temperature degrees temp celsius", _number(-12, 39)),
    "goods": ("items products goods groceries things order", _goods),
    "foods": ("items foods list food", _listed(lambda r: words.plural(r.choice(words.SOLID)), 2, 5)),
    "colors": ("colors items list", _listed(lambda r: r.choice(words.COLORS), 2, 5)),
    "animals": ("animals items list", _listed(lambda r: words.plural(r.choice(words.ANIMALS)), 2, 5)),
    "languages": ("languages skills speaks", _listed(lambda r: r.choice(words.LANGUAGES), 1, 4)),
    "cities": ("cities places visited", _listed(words.city, 2, 4)),
    "tags": ("tags skills keywords", _listed(_tag, 2, 5)),
    "price": ("price cost amount total price_eur", _price),
    "code": ("code id number order_id ticket", _same(words.code)),
    "dish": ("name title dish recipe recipe_name", _pick(DISHES)),
    "ingredients": ("ingredients items needs", _listed(lambda r: r.choice(PANTRY), 2, 5)),
    "minutes": ("minutes time cooking_time duration cook_time_minutes", _number(2, 120)),
    "count": ("count quantity number amount servings", _number(2, 90)),
    "item": ("item product name product_name thing", _pick(words.ITEMS)),
    "items": ("item product name products", _same(lambda r: words.plural(r.choice(words.ITEMS)))),
    "stock": ("in_stock available", _stock(("in stock", "sold out"))),
    "is_stock": ("in_stock available", _stock(("is in stock", "is sold out"))),
    "plan": ("plan plan_interest subscription", _pick(PLANS)),
    "phone": ("phone phone_number tel number", _same(_phone)),
    "company": ("company company_name employer name", _same(_company)),
    "from": ("from origin from_city departure source", _same(words.city)),
    "to": ("to destination to_city arrival city", _same(words.city)),
    "days": ("days nights duration length", _number(2, 30)),
    "author": ("author writer by director", _same(words.full_name)),
    "title": ("title name book", _same(_title)),
    "pages": ("pages page_count length", _number(20, 900)),
    "staff": ("employees staff people size", _number(2, 9000)),
    "priority": ("priority level urgency", _pick(["low", "medium", "high"])),
}  # fmt: skip
OPTIONS = {
    "animal": words.ANIMALS,
    "condition": CONDITIONS,
    "color": words.COLORS,
    "plan": PLANS,
    "priority": ["low", "medium", "high"],
    "day": words.DAYS,
    "job": words.JOBS,
}
TRUTHS = {  # what follows from a word: (names, the words for which it is true)
    "condition": [("sunny is_sunny", ["sunny"]), ("rain rainy raining", ["rainy", "stormy"])],
    "animal": [("can_fly flies", ["bird", "owl", "duck", "bee", "dragon"])],
}


@cache
def scenes() -> dict[str, list[str]]:
    """Return the sentences of each subject."""
    lines = Path(__file__).with_name("scenes.txt").read_text().splitlines()
    found: dict[str, list[str]] = {}
    for subject, sentence in (line.split(": ", 1) for line in lines if not line.startswith("#")):
        found.setdefault(subject, []).append(sentence)
    return found


def _options(rng: random.Random, slot: str, value: str) -> tuple[str, ...]:
    """Return some of the values that the slot may have, this one among them."""
    others = [other for other in OPTIONS[slot] if other != value]
    chosen = [value, *rng.sample(others, min(len(others), rng.randint(1, 3)))]
    rng.shuffle(chosen)
    return tuple(chosen)


def _slot(rng: random.Random, slot: str) -> tuple[str, str, list[Field]]:
    """Draw the slot of a sentence ("A_animal": with its article); return it, as it is said, and the facts in it."""
    name = slot[2:] if slot[:2] in ("a_", "A_") else slot
    name = name.lower()
    names, draw = SLOTS[name]
    told, value = draw(rng)
    options = _options(rng, name, value) if name in OPTIONS and rng.random() < 0.3 else ()
    kind = "number" if name == "price" else ""  # 12 and 12.50
    fields = [Field(tuple(names.split()), value, options, kind)]
    for truth, true in TRUTHS.get(name, []):
        if rng.random() < 0.25:
            fields.append(Field(tuple(truth.split()), value in true))
    if slot[1:2] == "_" and name != slot:
        told = f"{words.article(told)} {told}"
    return slot, told[0].upper() + told[1:] if slot[0].isupper() else told, fields


def scene(rng: random.Random, subject: str, sentence: str = "") -> tuple[str, list[Field]]:
    """Return a sentence about the subject and the facts in it, in their order."""
    sentence = sentence or rng.choice(scenes()[subject])
    slots = dict.fromkeys(name for _, name, _, _ in Formatter().parse(sentence) if name)
    told: dict[str, str] = {}
    fields: list[Field] = []
    for slot in slots:
        _, told[slot], more = _slot(rng, slot)
        fields += more
    return sentence.format(**told), fields


def some(rng: random.Random, fields: list[Field]) -> list[Field]:
    """Return the fields that a schema asks for, in the order of the schema."""
    wanted = list(fields)
    if rng.random() < 0.45:
        wanted = [field for field in fields if rng.random() < STAY] or [rng.choice(fields)]
    if rng.random() < 0.35:
        rng.shuffle(wanted)
    return wanted
