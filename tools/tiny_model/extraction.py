"""Passages that hold facts: a JSON object to be drawn from one, and a fact to be found in a long one."""

import json
import random
from typing import Any

from tools.tiny_model import stories, words
from tools.tiny_model.sample import Sample, ask


def email(rng: random.Random) -> str:
    """Return a made-up address."""
    return f"{words.first_name(rng).lower()}{rng.choice(['', '.', '_'])}{words.made_up(rng)}@{words.made_up(rng)}.{rng.choice(['com', 'org', 'net'])}"


FIELDS = {
    "name": words.full_name,
    "age": lambda rng: rng.randint(1, 99),
    "city": words.city,
    "job": lambda rng: rng.choice(words.JOBS),
    "email": email,
    "item": lambda rng: rng.choice(words.ITEMS),
    "count": lambda rng: rng.randint(2, 400),
    "price": lambda rng: rng.choice([rng.randint(1, 99), round(rng.randint(100, 9999) / 100, 2)]),
    "color": lambda rng: rng.choice(words.COLORS),
    "date": lambda rng: f"{rng.randint(1, 28)} {rng.choice(words.MONTHS)}",
    "code": words.code,
}
FORMS: list[tuple[tuple[str, ...], list[str]]] = [
    (
        ("name", "age", "city"),
        [
            "{name} is {age} years old and lives in {city}.",
            "{name}, {age}, comes from {city}.",
            "In {city} lives {name}, who is {age}.",
            "My name is {name}. I am {age} and I live in {city}.",
        ],
    ),
    (
        ("name", "job", "city"),
        [
            "{name} works as {a_job} {job} in {city}.",
            "The {job} {name} lives in {city}.",
            "{name} moved to {city} and became {a_job} {job}.",
        ],
    ),
    (
        ("name", "email", "age"),
        [
            "You can write to {name} at {email}. {name} is {age}.",
            "{name} ({age} years old) has the address {email}.",
        ],
    ),
    (
        ("name", "count", "item", "price"),
        [
            "{name} bought {count} {items} for {price} euros each.",
            "{name} ordered {count} of the {items}. One {item} costs {price} euros.",
            "Order of {name}: {count} {items} at {price} euros.",
        ],
    ),
    (
        ("item", "color", "price"),
        [
            "The {color} {item} costs {price} euros.",
            "We sell a {color} {item} for {price} euros.",
            "For {price} euros you get the {item}, and it is {color}.",
        ],
    ),
    (
        ("name", "date", "city"),
        [
            "{name} will arrive in {city} on {date}.",
            "On {date} {name} travels to {city}.",
            "{name} was born in {city} on {date}.",
        ],
    ),
    (
        ("code", "name", "date"),
        [
            "Ticket {code} was opened by {name} on {date}.",
            "On {date} {name} got the code {code}.",
        ],
    ),
]
EXTRACTS = [
    "Extract {keys} as JSON: {text}",
    "Give me {keys} as JSON.\n{text}",
    "Extract {keys} as a JSON object.\n\n{text}",
    "{text}\n\nWrite {keys} as JSON.",
    "Return JSON with the keys {keys}.\nText: {text}",
    "Extract the {keys} as JSON: {text}",
    "{text} Give me the {keys} as JSON.",
]


def to_json(rng: random.Random) -> Sample:
    """A passage and the keys that are wanted, in the order they are wanted."""
    keys, forms = rng.choice(FORMS)
    facts: dict[str, Any] = {key: FIELDS[key](rng) for key in keys}
    text = rng.choice(forms).format(
        **facts,
        items=words.plural(str(facts.get("item"))),
        a_job=words.article(str(facts.get("job"))),
    )
    if rng.random() < 0.3:
        text += " " + rng.choice(
            ["It was a sunny day.", "That is all.", "Please write soon.", "Everybody was happy."]
        )
    wanted = list(keys)
    if rng.random() < 0.5:
        rng.shuffle(wanted)
    if rng.random() < 0.3:
        wanted = wanted[:2]
    expected = {key: facts[key] for key in wanted}
    request = rng.choice(EXTRACTS).format(keys=words.listing(wanted), text=text)
    return Sample(
        "json",
        json.dumps(expected, ensure_ascii=False),
        key=text,
        messages=ask(request),
        expected=expected,
    )


# A fact: how it is told, how it is asked for, and what the value alone is.
def _fact(rng: random.Random) -> tuple[str, str, str, str]:
    """Return (subject that must be unique, sentence, question, value)."""
    sort = rng.randrange(7)
    name = words.first_name(rng)
    if sort == 0:
        value = words.code(rng)
        return (
            f"code {name}",
            f"The code of {name} is {value}.",
            f"What is the code of {name}?",
            value,
        )
    if sort == 1:
        value = words.city(rng)
        return f"lives {name}", f"{name} lives in {value}.", f"Where does {name} live?", value
    if sort == 2:
        value = words.eaten(rng.choice(words.FOODS))
        return f"likes {name}", f"{name} likes {value}.", f"What does {name} like?", value
    if sort == 3:
        color, item = rng.choice(words.COLORS), rng.choice(words.ITEMS)
        value = rng.choice(words.PLACES)
        thing = f"the {color} {item}"
        return thing, f"The {color} {item} is in the {value}.", f"Where is {thing}?", value
    if sort == 4:
        value = rng.choice(words.JOBS)
        return (
            f"works {name}",
            f"{name} works as {words.article(value)} {value}.",
            f"What is the job of {name}?",
            value,
        )
    if sort == 5:
        value = words.first_name(rng)
        animal = rng.choice(words.ANIMALS)
        return (
            f"{animal} {name}",
            f"The {animal} of {name} is called {value}.",
            f"What is the {animal} of {name} called?",
            value,
        )
    value = words.code(rng)
    door = rng.randint(1, 99)
    return (
        f"room {door}",
        f"The key of room {door} is {value}.",
        f"What is the key of room {door}?",
        value,
    )


ONLY = " Answer with the value only."


def find(rng: random.Random, facts: int | None = None) -> Sample:
    """A text of many facts and questions about some of them; `facts` fixes how many facts."""
    many = facts or (rng.randint(2, 12) if rng.random() < 0.55 else rng.randint(10, 64))
    told: dict[str, tuple[str, str, str]] = {}
    while len(told) < many:
        subject, sentence, asked, value = _fact(rng)
        told.setdefault(subject, (sentence, asked, value))
    questions = rng.sample(list(told.values()), min(many, rng.choice([1, 1, 2, 4, 6])))
    text = rng.choice([" ", "\n"]).join(fact[0] for fact in told.values())
    if rng.random() < 0.15:
        text = f"{stories.write(rng)[0]}\n\n{text}"
    head = f"{rng.choice(['Read this text.', 'Here are some notes.', 'Text:'])}\n\n{text}\n\n"
    messages: list[dict[str, str]] = []
    answer = ""
    for sentence, asked, value in questions:
        if answer:
            messages.append({"role": "assistant", "content": answer})
        only = rng.random() < 0.35
        request = head + asked + (ONLY if only else "")
        answer = value if only else sentence
        messages.append({"role": "user", "content": request})
        head = ""
    key = "".join(message["content"] for message in messages)
    return Sample("retrieval", answer, key, messages, expected=answer, every_turn=True)
