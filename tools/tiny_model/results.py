"""Conversations in which a function has answered: the sentence that tells its result, and nothing that it did not say.

Knows the functions of the toolbox. A result is an object with some of the facts that there could be, or plain text.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from tools.tiny_model import scenes, toolbox, words
from tools.tiny_model.sample import Sample, ask

Fact = tuple[
    tuple[str, ...], Callable[[random.Random], Any]
]  # keys that it may have, how it is drawn

FACTS: dict[str, dict[str, Fact]] = {
    "get_weather": {
        "sky": (("sky", "condition", "weather", "description", "conditions"), lambda rng: rng.choice(scenes.CONDITIONS)),
        "degrees": (("degrees", "temperature", "temp", "celsius"), lambda rng: rng.randint(-9, 38)),
    },
    "get_time": {"time": (("time", "now", "local_time"), toolbox.clock)},
    "get_price": {"price": (("price", "cost", "euros"), lambda rng: rng.randint(1, 400))},
    "get_stock_price": {"price": (("price", "value", "quote"), lambda rng: round(rng.uniform(1, 900), 2))},
    "find_person": {
        "city": (("city", "home", "location"), words.city),
        "job": (("job", "role", "occupation"), lambda rng: rng.choice(words.JOBS)),
    },
    "add_numbers": {"sum": (("sum", "result", "total", "value"), lambda rng: 0)},
    "multiply": {"product": (("product", "result", "value"), lambda rng: 0)},
    "set_alarm": {"ok": (("ok", "success", "done"), lambda rng: True)},
    "get_order": {"state": (("state", "status"), lambda rng: rng.choice(["on its way", "delivered", "packed", "late", "not found"]))},
}  # fmt: skip
SENTENCES = {  # by the facts that are there
    ("get_weather", "sky degrees"): "The weather in {city} is {sky} with {degrees} degrees.",
    ("get_weather", "degrees"): "It is {degrees} degrees in {city}.",
    ("get_weather", "sky"): "The weather in {city} is {sky}.",
    ("get_time", "time"): "It is {time} in {city}.",
    ("get_price", "price"): "The {item} costs {price} euros.",
    ("get_stock_price", "price"): "The price of {symbol} is {price}.",
    ("find_person", "city"): "{name} lives in {city}.",
    ("find_person", "job"): "{name} is {a_job} {job}.",
    ("find_person", "city job"): "{name} is {a_job} {job} and lives in {city}.",
    ("add_numbers", "sum"): "{a} + {b} = {sum}",
    ("multiply", "product"): "{a} times {b} is {product}.",
    ("set_alarm", "ok"): "The alarm is set for {time}.",
    ("get_order", "state"): "Order {order_id} is {state}.",
}


def _told(rng: random.Random, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """Return the result of a known function, as it gives it, and the sentence that tells it."""
    there = {key: fact for key, fact in FACTS[name].items() if rng.random() < 0.6} or FACTS[name]
    facts = {key: draw(rng) for key, (_, draw) in there.items()}
    if name == "add_numbers":
        facts["sum"] = arguments["a"] + arguments["b"]
    if name == "multiply":
        facts["product"] = arguments["a"] * arguments["b"]
    job = words.article(facts.get("job", "x"))
    sentence = SENTENCES[name, " ".join(facts)].format(**{**arguments, **facts, "a_job": job})
    usual = rng.random() < 0.5
    shown = {there[key][0][0] if usual else rng.choice(there[key][0]): one for key, one in facts.items()}  # fmt: skip
    if rng.random() < 0.25:  # the arguments come back as well
        shown = {**{k: v for k, v in arguments.items() if k not in shown}, **shown}
    if rng.random() < 0.2 and "degrees" in facts:
        shown["unit"] = "celsius"
    if rng.random() < 0.15 and len(facts) == 1 and name != "set_alarm":
        return str(next(iter(facts.values()))), sentence
    return json.dumps(shown), sentence


def _plain(rng: random.Random) -> tuple[str, str]:
    """Return a result of any function, and the answer that repeats it."""
    draw = rng.random()
    if draw < 0.5:
        text, _ = scenes.scene(rng, rng.choice(list(scenes.scenes())))
        return text, text
    if draw < 0.6:
        problem = rng.choice(["not found", "no such city", "out of time", "no answer", "no access"])
        return json.dumps({"error": problem}), f"It did not work: {problem}."
    keys = rng.sample(["id", "status", "count", "name", "code", "total", "room", "color"], rng.randint(1, 3))  # fmt: skip
    drawn: dict[str, Callable[[], Any]] = {
        "id": lambda: rng.randint(1, 9999),
        "status": lambda: rng.choice(["ok", "done", "open", "closed", "sent", "booked"]),
        "count": lambda: rng.randint(1, 99),
        "name": lambda: words.first_name(rng),
        "code": lambda: words.code(rng),
        "total": lambda: rng.randint(1, 999),
        "room": lambda: rng.choice(words.PLACES),
        "color": lambda: rng.choice(words.COLORS),
    }
    facts = {key: drawn[key]() for key in keys}
    return json.dumps(facts), f"The result: {', '.join(f'{k} {v}' for k, v in facts.items())}."


def respond(rng: random.Random) -> Sample:
    """A conversation in which the function has answered once, or to each of several calls: a sentence for each result."""
    name = rng.choice(list(FACTS)) if rng.random() < 0.75 else rng.choice(list(toolbox.CATALOGUE))
    if toolbox.has_one_argument(name) and rng.random() < 0.2:
        text, several = toolbox.requests(rng, name)
    else:
        text, one = toolbox.request(rng, name)
        several = [one]
    known = name in FACTS and rng.random() < 0.92
    results = [_told(rng, name, each) if known else _plain(rng) for each in several]
    answer = " ".join(sentence for _, sentence in results)
    offers = [toolbox.offer(name, rng)]
    made = [{"type": "function", "function": offers[0].call(each)} for each in several]
    others = [other for other in toolbox.CATALOGUE if other != name]
    offers += [toolbox.offer(other, rng) for other in rng.sample(others, rng.randint(0, 2))]
    rng.shuffle(offers)
    called = {"role": "assistant", "content": "", "tool_calls": made}
    told = [{"role": "tool", "content": result} for result, _ in results]
    return Sample(
        "tool_result",
        answer,
        key=text + "".join(result for result, _ in results),
        messages=[*ask(text, rng.choice(toolbox.SYSTEMS)), called, *told],
        tools=None if rng.random() < 0.1 else [each.schema for each in offers],
        expected=answer,
        every_turn=True,
    )
