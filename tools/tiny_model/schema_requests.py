"""Requests for an object by a schema that the prompt does not show, as clients send them: sentences, and things to make up.

Each function draws one `Sample` whose `expected` is the object. Knows the scenes; knows nothing of tokens.
"""

import json
import random
from dataclasses import replace
from typing import Any

from tools.tiny_model import facts, scenes, schemas, toolbox, words
from tools.tiny_model.facts import COUNTRY_FACTS
from tools.tiny_model.sample import Sample
from tools.tiny_model.scenes import Field

BEFORE = (
    "|||||||Extract: |Extract the {s}: |Extract the {s} information: |Extract the data: |Parse this: |Text: |Input: |"
    "Extract the {s} from this text: |Extract the information from this text: |Get the {s}.\n\n|Extract the {s}.\n|"
    "Read this text.\n\n"
).split("|")
AFTER = ["", "", "", "", "", "", " Extract the {s}.", "\n\nExtract the {s}.", " What is the {s}?", "\nFill in the form."]  # fmt: skip
SYSTEMS = [
    "Extract the {s} information.",
    "Extract the {s}.",
    "Extract the event information.",
    "You are a helpful assistant.",
    "You are a helpful assistant that extracts data.",
    "You extract information from text.",
    "Extract information about the {s} from the text.",
    "Answer in JSON.",
    "You read texts and fill in forms with what they say.",
]
IN_JSON = [" Answer in JSON.", " Give me JSON.", "\nReturn a JSON object.", " Answer as JSON.", " As JSON, please.", " Reply in JSON."]  # fmt: skip
SHOWN = [
    "Answer in JSON that fits this schema:\n{j}",
    "Answer with a JSON object of this schema: {j}",
    "Here is the JSON schema of the answer:\n{j}",
    "Read the text, and give what it says as JSON that matches the following schema:\n\n{j}",
]
ENDS = ["", "", "", "", "", " It was a sunny day.", " That is all.", " Please write soon.", " Thank you!"]  # fmt: skip
MANY = ["items", "results", "data", "list", "entries"]
PLURALS = {"person": ["people", "persons", "users"], "animal": ["animals", "pets"], "weather": ["cities", "reports"], "shopping": ["orders"], "words": ["lists"]}  # fmt: skip
ALONE = ("shopping", "words", "recipe")  # these have lists themselves
INVENTED = "person animal event product book contact".split()
INVENT = ["Give me an example of {a_s}.", "Make up {a_s}.", "Invent {a_s}.", "Generate {a_s}.", "Create {a_s}.", "Give me {a_s}.", "Describe {a_s}.", "Generate a random {s}.", "Create an interesting {s}."]  # fmt: skip
UNKNOWN = {str: "unknown", int: 0, float: 0, bool: False, list: []}


def _styled(rng: random.Random, name: str) -> str:
    """Return the name of a key as some programs write it."""
    if "_" in name and rng.random() < 0.2:
        first, *rest = name.split("_")
        return first + "".join(part.capitalize() for part in rest)
    return name


def named(rng: random.Random, fields: list[Field], usual: bool = False) -> dict[str, Any]:
    """Return an object of the fields, each under one of its names; `usual`: its first name wherever that is free."""
    first = [field.names[0] for field in fields]
    made: dict[str, Any] = {}
    for field in fields:
        own = [n for n in field.names if first.count(n) <= (n == field.names[0]) and n not in made]
        if not own:
            continue
        fixed = usual or rng.random() < 0.5
        name = own[0] if fixed else rng.choice(own)
        made[name if usual else _styled(rng, name)] = _packed(rng, field, usual)
    return made


def _packed(rng: random.Random, field: Field, usual: bool) -> Any:
    """Return the value of a field: goods become objects, or names only."""
    if field.names[0] != "items" or not field.value or not isinstance(field.value[0], tuple):
        return field
    if not usual and rng.random() < 0.3:
        return [name for name, _ in field.value]
    one = "name" if usual else rng.choice(["name", "item", "product"])
    many = "quantity" if usual else rng.choice(["quantity", "count", "amount", "quantity"])
    turned = not usual and rng.random() < 0.2
    pairs = [{one: name, many: count} for name, count in field.value]
    return [dict(reversed(pair.items())) for pair in pairs] if turned else pairs


def _wrapped(rng: random.Random, subject: str, made: dict[str, Any]) -> dict[str, Any]:
    """Return the object, now and then within another or with a part of it in its own object."""
    draw = rng.random()
    if draw < 0.05:
        return {subject: made}
    if draw < 0.1 and {"city", "country"} <= set(made):
        place = {key: made.pop(key) for key in ("city", "country")}
        return {**made, rng.choice(["address", "location", "place"]): place}
    if draw < 0.14:
        other = rng.choice([s for s in scenes.scenes() if s != subject])
        field = rng.choice(scenes.scene(rng, other)[1])
        known = {str(one) for one in made}
        if not known & set(field.names) and not isinstance(field.value, list):
            return {**made, rng.choice(field.names[:2]): UNKNOWN[type(field.value)]}
    return made


def _several(rng: random.Random, subject: str) -> tuple[str, dict[str, Any]]:
    """Two or three sentences of one form, and a list of objects with the same keys."""
    sentence = rng.choice(scenes.scenes()[subject])
    drawn = [scenes.scene(rng, subject, sentence) for _ in range(rng.choice([2, 2, 3]))]
    keys = sorted(rng.sample(range(len(drawn[0][1])), rng.randint(1, len(drawn[0][1]))))
    seed = rng.random()
    objects = []
    for _, fields in drawn:
        if len(fields) != len(drawn[0][1]):  # a truth was drawn for some only
            return _several(rng, subject)
        free = [replace(fields[key], options=()) for key in keys]  # one schema is for all
        objects.append(named(random.Random(seed), free))
    if len({tuple(made) for made in objects}) > 1:
        return _several(rng, subject)
    key = rng.choice(PLURALS.get(subject, [f"{subject}s"]) + MANY)
    return " ".join(text for text, _ in drawn), {key: objects}


def extract(rng: random.Random) -> Sample:
    """A sentence, and the object that a schema asks for; the keys are known to the schema only."""
    subject = rng.choice(list(scenes.scenes()))
    draw = rng.random()
    if draw > 0.96:
        text, opinion = facts.judged(rng)
        field = Field(
            ("sentiment", "label", "opinion", "category"), opinion, ("positive", "negative")
        )
        return _sample(rng, "review", text, named(rng, [field]))
    if draw < 0.16 and subject not in ALONE:
        text, made = _several(rng, subject)
        return _sample(rng, subject, text, made)
    text, fields = scenes.scene(rng, subject)
    if draw < 0.25:  # the words themselves say that JSON is wanted: the usual keys
        made = named(rng, fields, usual=True)
        request = text + rng.choice(IN_JSON)
        answer = schemas.pieces(made, keys=schemas.VALUE)
        return _made("schema", text, [{"role": "user", "content": request}], made, answer)
    made = _wrapped(rng, subject, named(rng, scenes.some(rng, fields)))
    return _sample(rng, subject, text, made)


def several(rng: random.Random) -> Sample:
    """Sentences of one form, and a list of objects."""
    subject = rng.choice([one for one in scenes.scenes() if one not in ALONE])
    text, made = _several(rng, subject)
    return _sample(rng, subject, text, made)


def _sample(rng: random.Random, subject: str, text: str, made: dict[str, Any]) -> Sample:
    """Return the request in one of the ways in which clients put it."""
    draw = rng.random()
    subject_said = rng.choice([subject, subject, "data", "details", "information"])
    text_said = text + rng.choice(ENDS)
    if draw < 0.1:  # the schema stands in the prompt
        schema = {"title": subject.capitalize(), **schemas.schema_of(made)}
        shown = rng.choice(SHOWN).format(j=json.dumps(schema, indent=rng.choice([None, None, 2])))
        messages = [{"role": "system", "content": shown}, {"role": "user", "content": text_said}]
        if rng.random() < 0.4:
            messages = [{"role": "user", "content": f"{text_said}\n\n{shown}"}]
        answer = schemas.pieces(made, keys=schemas.VALUE)
        return _made("schema", text, messages, made, answer)
    system = rng.choice(SYSTEMS).format(s=subject_said) if draw < 0.3 else None
    before = "" if system else rng.choice(BEFORE)
    request = (before + text_said).format(s=subject_said) if before else text_said
    if not before:
        request += rng.choice(AFTER).format(s=subject_said)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": request})
    return _made("schema", text, messages, made, schemas.pieces(made, tight=rng.random() < 0.12))


def _made(
    family: str, key: str, messages: list[dict[str, Any]], made: dict[str, Any], answer: list[schemas.Piece]
) -> Sample:  # fmt: skip
    schema = schemas.schema_of(made)
    return Sample(
        family,
        "".join(text for text, _ in answer),
        key,
        messages,
        expected=schemas.plain(made),
        pieces=answer,
        schema=schema,
    )


def call(rng: random.Random) -> Sample:
    """A sentence, and a function whose arguments are the object: how some clients ask for one."""
    subject = rng.choice(list(scenes.scenes()))
    text, fields = scenes.scene(rng, subject)
    made = named(rng, scenes.some(rng, fields))
    name = rng.choice([subject.capitalize(), subject.capitalize(), f"extract_{subject}", f"save_{subject}", "final_result", "output", "Response"])  # fmt: skip
    function: dict[str, Any] = {"name": name, "parameters": schemas.schema_of(made)}
    if rng.random() < 0.7:
        function["description"] = rng.choice([f"{words.article(subject).capitalize()} {subject}", f"Save the {subject}", f"Extracted `{name}` with all required parameters", "The final answer, which ends the conversation"])  # fmt: skip
    tools = [{"type": "function", "function": function}]
    if rng.random() < 0.3:
        tools += toolbox.some(rng)[:1]
        rng.shuffle(tools)
    before, after = rng.choice([("", ""), ("", ""), ("Extract: ", ""), ("Extract the data: ", ""), ("", " Save it."), (f"Save this {subject}: ", "")])  # fmt: skip
    made_call = {"name": name, "arguments": schemas.plain(made)}
    messages = [{"role": "user", "content": before + text + after}]
    return Sample("schema_tool", "", text, messages, tools, [made_call], expected=made_call)


def _weaker(answer: list[schemas.Piece], sure: set[str]) -> list[schemas.Piece]:
    """Return the pieces with less weight on values that the prompt does not hold."""
    return [(text, weight if text in sure else min(weight, 0.3)) for text, weight in answer]


def invent(rng: random.Random) -> Sample:
    """Something to be made up: any value of the right sort, whole words, an end."""
    draw = rng.random()
    if draw < 0.35:
        return _weather(rng)
    if draw < 0.6:
        return _recipe(rng)
    if draw < 0.8:
        return _country(rng)
    subject = rng.choice(INVENTED)
    _, fields = scenes.scene(rng, subject)
    made = named(rng, scenes.some(rng, fields))
    asked = rng.choice(INVENT).format(s=subject, a_s=f"{words.article(subject)} {subject}")
    answer = _weaker(schemas.pieces(made), set())
    return _made("invent", "", [{"role": "user", "content": asked}], made, answer)


def _weather(rng: random.Random) -> Sample:
    city, condition = words.city(rng), rng.choice(scenes.CONDITIONS)
    fields = [
        Field(("city", "location", "place", "town"), city),
        Field(("sunny", "is_sunny"), condition == "sunny"),
        Field(("condition", "weather", "description", "sky"), condition),
        Field(("temperature", "degrees", "temp"), rng.randint(-5, 35)),
        Field(("rain", "will_rain"), condition == "rainy"),
        Field(("unit", "temperature_unit"), "celsius", ("celsius", "fahrenheit")),
    ]
    made = named(rng, [fields[0], *(f for f in fields[1:] if rng.random() < 0.4)])
    form = rng.choice(["What is the weather in {c}?", "What's the weather like in {c}?", "How is the weather in {c}?", "What is the weather in {c} today?", "Weather in {c}", "Will it rain in {c}?", "Is it sunny in {c}?", "Tell me the weather in {c}."])  # fmt: skip
    messages = [{"role": "user", "content": words.typed(rng, form.format(c=city))}]
    answer = _weaker(schemas.pieces(made, tight=rng.random() < 0.1), {json.dumps(city)})
    return _made("invent", "" if city in words.CITIES else city, messages, made, answer)


def _recipe(rng: random.Random) -> Sample:
    dish = rng.choice(scenes.DISHES) if rng.random() < 0.7 else f"{words.made_up(rng)} soup"
    parts = rng.sample(scenes.PANTRY, rng.randint(3, 5))
    listed: list[Any] = list(parts)
    if rng.random() < 0.4:
        amounts = ["1 cup", "2 cups", "100 g", "200 g", "a little", "1 spoon", "3"]
        listed = [{"name": part, "amount": rng.choice(amounts)} for part in parts]
    steps = [f"Mix the {parts[0]} and the {parts[1]}.", f"Add the {parts[2]}.", f"Cook it for {5 * rng.randint(1, 9)} minutes.", "Serve it warm."]  # fmt: skip
    fields = [
        Field(("name", "title", "dish", "recipe_name"), dish),
        Field(("ingredients",), listed),
        Field(("steps", "instructions", "directions"), steps),
        Field(("minutes", "cooking_time", "time"), 5 * rng.randint(1, 12)),
        Field(("servings", "people"), rng.randint(1, 8)),
    ]
    made: dict[str, Any] = named(
        rng, [fields[0], *(f for f in fields[1:] if rng.random() < 0.55)], usual=rng.random() < 0.6
    )
    if rng.random() < 0.15:
        made = {"recipe": made}
    form = rng.choice(["Give me a recipe for {d}.", "Recipe for {d}", "How do I make {d}?", "Write a recipe for {d}.", "Generate a {d} recipe.", "I want to cook {d}.", "Generate a recipe for {d}."])  # fmt: skip
    messages = [{"role": "user", "content": words.typed(rng, form.format(d=dish))}]
    return _made(
        "invent",
        "" if dish in scenes.DISHES else dish,
        messages,
        made,
        _weaker(schemas.pieces(made), {json.dumps(dish)}),
    )


def _country(rng: random.Random) -> Sample:
    name, capital, tongue = rng.choice(COUNTRY_FACTS)
    fields = [
        Field(("country", "name", "nation"), name),
        Field(("capital", "city", "capital_city", "answer"), capital),
        Field(("language", "languages", "official_language"), tongue),
    ]
    made = named(rng, [field for field in fields if rng.random() < 0.7] or [fields[1]])
    if "languages" in made:
        made["languages"] = [tongue]
    form = rng.choice(["What is the capital of {n}?", "Tell me about {n}.", "Give me the capital of {n}.", "Information about {n}", "Where is {n}?"])  # fmt: skip
    messages = [{"role": "user", "content": words.typed(rng, form.format(n=name))}]
    return _made("invent", "", messages, made, schemas.pieces(made))
