"""Functions that may be offered, requests that need one of them, and the calls that answer.

The catalogue is closed, the values are not: names, cities and codes are made up so that they must be copied.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.tiny_model import words
from tools.tiny_model.sample import Sample, ask

Draw = Callable[[random.Random], Any]


def _text(rng: random.Random) -> str:
    return " ".join(rng.sample(words.SORTABLE, rng.randint(2, 4)))


def _pick(values: list[str]) -> Draw:
    return lambda rng: rng.choice(values)


def _number(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def clock(rng: random.Random) -> str:
    """Return a time of day."""
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"


# name: (description, {argument: (type, draw)}, requests)
CATALOGUE: dict[str, tuple[str, dict[str, tuple[str, Draw]], list[str]]] = {
    "get_weather": (
        "Get the weather in a city",
        {"city": ("string", words.city)},
        [
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Will it rain in {city}?",
            "What's the weather like in {city}?",
            "What's the weather in {city}?",
            "How warm is it in {city}?",
            "Weather in {city}",
        ],
    ),
    "get_time": (
        "Get the time in a city",
        {"city": ("string", words.city)},
        ["What time is it in {city}?", "Tell me the time in {city}."],
    ),
    "send_email": (
        "Send an email",
        {"to": ("string", words.full_name), "text": ("string", _text)},
        ["Write an email to {to}: {text}", "Send an email to {to} that says {text}."],
    ),
    "set_alarm": (
        "Set an alarm",
        {"time": ("string", clock)},
        ["Wake me up at {time}.", "Set an alarm for {time}."],
    ),
    "add_numbers": (
        "Add two numbers",
        {"a": ("integer", _number(1, 999)), "b": ("integer", _number(1, 999))},
        ["Add {a} and {b}.", "What is {a} plus {b}?"],
    ),
    "search": (
        "Search for a text",
        {"query": ("string", _text)},
        ["Search for {query}.", "Find something about {query}."],
    ),
    "play_music": (
        "Play music of an artist",
        {"artist": ("string", words.full_name)},
        ["Play something by {artist}.", "I want to hear music of {artist}."],
    ),
    "book_flight": (
        "Book a flight",
        {"from_city": ("string", words.city), "to_city": ("string", words.city)},
        [
            "Book a flight from {from_city} to {to_city}.",
            "I want to fly from {from_city} to {to_city}.",
        ],
    ),
    "translate": (
        "Translate a text",
        {"text": ("string", _text), "language": ("string", _pick(words.LANGUAGES))},
        ["Translate {text} into {language}.", "How do you say {text} in {language}?"],
    ),
    "find_person": (
        "Find a person",
        {"name": ("string", words.full_name)},
        ["Who is {name}?", "Find {name} for me.", "Look up {name}."],
    ),
    "order_food": (
        "Order food",
        {"food": ("string", _pick(words.FOODS)), "count": ("integer", _number(1, 30))},
        ["Order {count} portions of {food}.", "I am hungry. Get me {food}, {count} times."],
    ),
    "turn_light": (
        "Turn a light on or off",
        {
            "room": ("string", _pick(words.PLACES)),
            "on": ("boolean", lambda rng: rng.random() < 0.5),
        },
        ["Turn the light in the {room} {on}.", "Light {on} in the {room}, please."],
    ),
    "set_temperature": (
        "Set the temperature of a room",
        {"room": ("string", _pick(words.PLACES)), "degrees": ("integer", _number(5, 35))},
        ["Set the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}."],
    ),
    "open_ticket": (
        "Look up a ticket",
        {"code": ("string", words.code)},
        ["Open ticket {code}.", "Show me the ticket {code}."],
    ),
    "call_phone": (
        "Call a person",
        {"name": ("string", words.full_name)},
        ["Call {name}.", "Please phone {name}."],
    ),
    "add_event": (
        "Add an event",
        {"title": ("string", _text), "day": ("string", _pick(words.DAYS))},
        ["Add {title} on {day}.", "Put {title} into my calendar on {day}."],
    ),
    "get_price": (
        "Get the price of an item",
        {"item": ("string", _pick(words.ITEMS))},
        ["How much is the {item}?", "What does the {item} cost?"],
    ),
    "rent_car": (
        "Rent a car",
        {"city": ("string", words.city), "days": ("integer", _number(1, 30))},
        ["Rent a car in {city} for {days} days.", "I need a car for {days} days in {city}."],
    ),
}
CATALOGUE |= {
    "multiply": (
        "Multiply two numbers",
        {"a": ("integer", _number(1, 99)), "b": ("integer", _number(1, 99))},
        ["What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b}"],
    ),
    "get_stock_price": (
        "Get the price of a stock",
        {"symbol": ("string", lambda rng: words.made_up(rng, 1, 2).upper())},
        ["What is the stock price of {symbol}?", "How much is a share of {symbol}?"],
    ),
    "get_order": (
        "Get the state of an order",
        {"order_id": ("string", words.code)},
        ["Where is my order {order_id}?", "When will order {order_id} arrive?"],
    ),
    "book_table": (
        "Book a table in a restaurant",
        {"people": ("integer", _number(1, 12)), "time": ("string", clock)},
        ["Book a table for {people} people at {time}.", "A table at {time} for {people}, please."],
    ),
    "remind": (
        "Set a reminder",
        {"text": ("string", _text), "time": ("string", clock)},
        ["Remind me of {text} at {time}.", "At {time}, remind me: {text}"],
    ),
    "get_news": (
        "Get the news about a topic",
        {"topic": ("string", _pick(words.SORTABLE))},
        ["What is new about {topic}?", "Give me the news about {topic}."],
    ),
}
SYSTEMS = [None, None, None, "You are a helpful assistant.", "Use the tools."]
NONE = 0.12  # how often no function fits
NONE_FITS = "None of my tools can do that."


ALIASES = {  # other names that a function or an argument may go by
    "get_weather": ["get_current_weather", "weather", "weather_forecast"],
    "get_time": ["get_current_time", "clock"],
    "send_email": ["send_message", "email"],
    "search": ["web_search", "search_web", "lookup"],
    "add_numbers": ["add", "sum"],
    "get_price": ["price_of"],
    "get_stock_price": ["stock_price", "quote"],
    "get_order": ["order_status", "track_order"],
    "remind": ["create_reminder", "set_reminder"],
    "multiply": ["product", "times"],
    "symbol": ["ticker", "stock"],
    "order_id": ["id", "number"],
    "call_phone": ["phone"],
    "city": ["location", "town", "place"],
    "to": ["recipient", "receiver"],
    "text": ["message", "content"],
    "time": ["at", "hour"],
    "query": ["q", "question"],
    "artist": ["singer", "band"],
    "from_city": ["origin", "start"],
    "to_city": ["destination", "goal"],
    "language": ["target", "target_language"],
    "name": ["person", "who"],
    "food": ["dish", "meal"],
    "count": ["amount", "quantity"],
    "room": ["place", "where"],
    "degrees": ["temperature", "value"],
    "code": ["id", "ticket"],
    "title": ["event", "what"],
    "day": ["date", "when"],
    "item": ["product", "article"],
    "days": ["duration", "length"],
    "a": ["x", "first"],
    "b": ["y", "second"],
    "on": ["state", "enabled"],
}


@dataclass(frozen=True)
class Offer:
    """A function of the catalogue as it is offered: perhaps with other names than usual."""

    name: str
    called: str
    renamed: dict[str, str]
    schema: dict[str, Any]

    def call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the call with these arguments, which have their usual names."""
        renamed = {self.renamed[key]: value for key, value in arguments.items()}
        return {"name": self.called, "arguments": renamed}


def _alias(rng: random.Random, name: str, often: float) -> str:
    if rng.random() >= often:
        return name
    if "_" in name and rng.random() < 0.3:
        first, *rest = name.split("_")
        return first + "".join(part.capitalize() for part in rest)
    return rng.choice(ALIASES.get(name, [name]))


def offer(name: str, rng: random.Random | None = None) -> Offer:
    """Return the function as an OpenAI tool; with `rng`, one in two differs from the usual form."""
    description, arguments, _ = CATALOGUE[name]
    rng = rng or random.Random(0)
    often = 0.5 if rng.random() < 0.5 else 0.0
    renamed = {key: _alias(rng, key, often) for key in arguments}
    properties = {renamed[key]: {"type": kind} for key, (kind, _) in arguments.items()}
    if rng.random() < often:
        for key, called in renamed.items():
            properties[called]["description"] = f"The {key.replace('_', ' ')}"
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() >= often / 2:
        parameters["required"] = list(properties)
    called = _alias(rng, name, often)
    function = {"name": called, "description": description, "parameters": parameters}
    if rng.random() < often / 3:
        del function["description"]
    return Offer(name, called, renamed, {"type": "function", "function": function})


def some(rng: random.Random) -> list[dict[str, Any]]:
    """Return one to three functions as OpenAI tools."""
    return [offer(name, rng).schema for name in rng.sample(list(CATALOGUE), rng.randint(1, 3))]


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def request(rng: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    _, arguments, requests = CATALOGUE[name]
    values = {key: draw(rng) for key, (_, draw) in arguments.items()}
    spoken = {key: _spoken(value) for key, value in values.items()}
    return rng.choice(requests).format(**spoken), values


def has_one_argument(name: str) -> bool:
    """Whether `requests` can ask for the function several times at once."""
    return len(CATALOGUE[name][1]) == 1


def requests(rng: random.Random, name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return one request for two or three values of the function's one argument, and the arguments of each call."""
    _, arguments, forms = CATALOGUE[name]
    ((key, (_, draw)),) = arguments.items()
    values: list[Any] = []
    while len(values) < 2 or (len(values) == 2 and rng.random() < 0.3):
        values = list(dict.fromkeys([*values, draw(rng)]))
    form, said = rng.choice(forms), words.listing(values)
    before = form[: form.index("{")].split(" ")[-2:-1]  # the word before the slot: in, of, for
    draw_form = rng.random()
    if draw_form < 0.25 and before:
        said = f" and {before[0]} ".join(values)
    elif draw_form < 0.4:
        said = ", ".join(values)
    elif draw_form < 0.55:
        return " ".join(form.format(**{key: value}) for value in values), [{key: value} for value in values]  # fmt: skip
    return form.format(**{key: said}), [{key: value} for value in values]


def _asked(
    rng: random.Random, offers: list[Offer], none: float
) -> tuple[str, dict[str, Any] | None]:
    """Return a request and the call that answers it; None, this often, where no function fits."""
    if rng.random() < none:
        names = {each.name for each in offers}
        return request(rng, rng.choice([name for name in CATALOGUE if name not in names]))[0], None
    wanted = rng.choice(offers)
    text, arguments = request(rng, wanted.name)
    return text, wanted.call(arguments)


def call(rng: random.Random) -> Sample:
    """Up to four offered functions and requests: for each the call, or a plain answer when none fits."""
    names = rng.sample(list(CATALOGUE), rng.choice([1, 2, 2, 3, 3, 4]))
    offers = [offer(name, rng) for name in names]
    text, made = _asked(rng, offers, NONE)
    key, messages = text, ask(text, rng.choice(SYSTEMS))
    for _ in range(rng.choice([0, 0, 1, 3])):
        messages.append({"role": "assistant", "content": "" if made else NONE_FITS})
        if made:
            messages[-1]["tool_calls"] = [{"type": "function", "function": made}]
        text, made = _asked(rng, offers, NONE)
        messages.append({"role": "user", "content": text})
        key += text
    return Sample(
        "tools",
        "" if made else NONE_FITS,
        key,
        messages,
        [each.schema for each in offers],
        [made] if made else None,
        expected=made or NONE_FITS,
        every_turn=True,
    )


def calls(rng: random.Random) -> Sample:
    """A request that names two or three values, and one call of the same function for each value."""
    name = rng.choice([name for name in CATALOGUE if has_one_argument(name)])
    others = [other for other in CATALOGUE if other != name]
    offers = [offer(each, rng) for each in [name, *rng.sample(others, rng.choice([0, 0, 1, 2]))]]
    text, arguments = requests(rng, name)
    made = [offers[0].call(each) for each in arguments]
    rng.shuffle(offers)
    return Sample(
        "calls",
        "",
        text,
        ask(text, rng.choice(SYSTEMS)),
        [each.schema for each in offers],
        made,
        expected=made,
    )
