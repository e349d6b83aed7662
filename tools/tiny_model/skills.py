"""Small skills: sums, sorting, repeating, counting, and honest answers about itself.

Each function draws one sample from a seeded generator. Wordings vary; answers have one form, so that greedy output
can be compared exactly.
"""

import random

from tools.tiny_model import words
from tools.tiny_model.sample import Sample, ask

SUMS = [
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "How much is {a} plus {b}?",
    "Please add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.",
    "What's {a} + {b}?",
    "{a}+{b}",
    "What is {a}+{b}?",
    "{a}+{b}=",
    "{a} plus {b}",
    "What is {a} plus {b}?",
    "What's {a} plus {b}?",
    "what is {a} and {b}?",
    "Sum of {a} and {b}",
    "Compute {a} + {b}.",
    "How much is {a} + {b}?",
    "Can you add {a} and {b}?",
    "Solve {a} + {b}",
    "What do {a} and {b} make?",
    "Hi, what is {a} + {b}?",
]
STORY_SUMS = [
    "{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?",
    "There are {a} {t} in one box and {b} {t} in another. How many {t} are there?",
]


def scratchpad(a: int, b: int) -> str:
    """Return the column addition of two numbers below 100, units first, one line a column."""
    units = a % 10 + b % 10
    carry = units // 10
    tens = a // 10 + b // 10 + carry
    return (
        f"{a // 10} {a % 10} + {b // 10} {b % 10}\n"
        f"{a % 10} + {b % 10} = {units}, write {units % 10}, carry {carry}\n"
        f"{a // 10} + {b // 10} + {carry} = {tens}"
    )


def total(rng: random.Random) -> Sample:
    """A sum of two numbers below 100, with the column addition as the thought (one in five works in the open)."""
    a, b = rng.randrange(100), rng.randrange(100)
    if rng.random() < 0.85:
        request = rng.choice(SUMS).format(a=a, b=b)
    else:
        request = rng.choice(STORY_SUMS).format(
            a=a,
            b=b,
            n=words.first_name(rng),
            t=rng.choice(["apples", "coins", "balls", "books", "keys"]),
        )
    thinking, result = rng.random() > 0.2, f"{a} + {b} = {a + b}"
    return Sample(
        "sums",
        result if thinking else f"{scratchpad(a, b)}\n\n{result}",
        key=f"{a}+{b}",
        messages=ask(words.typed(rng, request)),
        reasoning=scratchpad(a, b),
        thinking=thinking,
        expected=a + b,
    )


SORTS = [
    "Sort these words: {w}",
    "Sort these words by the alphabet: {w}",
    "Put these words in order: {w}",
    "Sort the list: {w}",
]


def sort(rng: random.Random) -> Sample:
    """Three to six known words to be put in alphabetical order."""
    chosen = rng.sample(words.SORTABLE, rng.randint(2, 6))
    answer = ", ".join(sorted(chosen))
    return Sample(
        "sort",
        answer,
        key=" ".join(chosen),
        messages=ask(rng.choice(SORTS).format(w=", ".join(chosen))),
        expected=answer,
    )


REPEATS = [
    "Repeat: {w}",
    "Repeat after me: {w}",
    "Say this: {w}",
    "Repeat these words: {w}",
    "Please say: {w}",
]


def _any_word(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.5:
        return rng.choice(words.SORTABLE + words.ADJECTIVES)
    if draw < 0.65:
        return words.code(rng)
    word = words.made_up(rng)
    return word.capitalize() if rng.random() < 0.4 else word


def repeat(rng: random.Random) -> Sample:
    """One to nine words, known, made up or codes, to be said again."""
    chosen = " ".join(_any_word(rng) for _ in range(rng.randint(1, 9)))
    return Sample(
        "repeat",
        chosen,
        key=chosen,
        messages=ask(rng.choice(REPEATS).format(w=chosen)),
        expected=chosen,
    )


def count(rng: random.Random) -> Sample:
    """Count from one number to another."""
    low = rng.randint(1, 60)
    high = low + rng.randint(1, 12)
    request = rng.choice(["Count from {a} to {b}.", "Please count from {a} to {b}."])
    key = f"{low} {high}"
    if rng.random() < 0.2:
        low, high, request, key = 1, rng.randint(2, 20), "Count to {b}.", ""
    request = words.typed(rng, request.format(a=low, b=high))
    answer = ", ".join(str(i) for i in range(low, high + 1))
    return Sample("count", answer, key=key, messages=ask(request), expected=answer)


ME = "I am quire-tiny, a tiny test model."
HONEST = [
    (
        [
            "Who are you?",
            "Who are you really?",
            "What model are you?",
            "Which model is this?",
            "Are you ChatGPT?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Introduce yourself.",
        ],
        f"{ME} I can tell short stories, add small numbers, fill in JSON, call tools and answer questions about a short text.",
    ),
    (
        ["What can you do?", "How can you help me?", "Help", "What are you good at?"],
        f"{ME} I can tell short stories, add small numbers, fill in JSON, call tools and answer questions about a short text.",
    ),
    (
        [
            "Hello",
            "Hi",
            "Hello!",
            "Hello there!",
            "Hello, world!",
            "Good day",
            "Hi there!",
            "Good morning",
            "Hey",
            "Good evening!",
        ],
        f"Hello! {ME} What can I do for you?",
    ),
    (
        ["Are you a human?", "Are you a real person?", "Are you alive?", "Are you human?"],
        f"No. {ME}",
    ),
    (
        ["Are you smart?", "Can I trust you?", "Do you know everything?", "Are you always right?"],
        f"No. {ME} I am often wrong.",
    ),
    (
        ["Who made you?", "Where do you come from?", "How were you trained?"],
        f"{ME} I was trained on made-up text that comes with Quire.",
    ),
    (
        ["How big are you?", "How many parameters do you have?"],
        f"{ME} I have a few million parameters.",
    ),
    (["Thank you", "Thanks!", "Thank you!", "Thanks a lot."], "You are welcome!"),
    (["Goodbye", "Bye", "See you later!", "Bye bye!"], "Goodbye!"),
    (
        [
            "How are you?",
            "Hello, how are you?",
            "Hi, how are you?",
            "How do you do?",
            "Are you well?",
        ],
        f"I am fine, thank you. {ME}",
    ),
]
UNKNOWN = [
    "What is the capital of {city}?",
    "Who was the first king of {city}?",
    "Write a program that can {v}.",
    "What is the weather in {city}?",
    "How do I fix my {item}?",
    "Why is the {place} {color}?",
    "Who won the game in {city}?",
    "Explain how {animals} {v}.",
    "What happened on {month} {day}?",
    "Translate '{item}' into {language}.",
    "How far is it from {city} to {city2}?",
    "Is it healthy to eat {food}?",
    "What is the meaning of {made}?",
    "Who is {name}?",
    "Where does {name} live?",
    "How old is {name}?",
    "What does {made} mean?",
    "When was {name} born?",
    "What is the price of {items} in {city}?",
    "Which {item} should I buy?",
    "Tell me a joke.",
    "Tell me a joke about {animals}.",
    "Write a poem about the {place}.",
    "Write a poem.",
    "Write a haiku about {made}.",
    "Write a letter to {name}.",
    "What is love?",
    "What is {made}?",
    "What is {thing}?",
    "What is the difference between {thing} and {made}?",
    "Explain {made}.",
    "Explain {thing} to me.",
    "How does {made} work?",
    "How do {items} work?",
    "How do I make {food}?",
    "How can I learn {language}?",
    "How many {animals} live in {city}?",
    "What is {a} times {b}?",
    "{a} * {b}",
    "What is {a} minus {b}?",
    "Why do {animals} {v}?",
    "Can you {v}?",
    "Can {animals} {v}?",
    "Do you like {food}?",
    "What is the best {item}?",
    "What should I do in {city}?",
    "Where is {city}?",
    "Where can I buy {items}?",
    "Who wrote {made}?",
    "Who is the president of {city}?",
    "What time is it?",
    "What day is it today?",
    "Give me a recipe for {food}.",
    "Give me five names for my {thing}.",
    "Say something in {language}.",
    "Summarize the book about {thing}.",
    "Write an essay about {thing}.",
    "Fix this code: {made}",
    "How old is the {place}?",
    "What do you think about {thing}?",
]
I_DO_NOT_KNOW = f"I do not know that. {ME}"


def honest(rng: random.Random) -> Sample:
    """A question about itself, a greeting, or something it cannot know and says so."""
    if rng.random() < 0.55:
        asked, answer = rng.choice(HONEST)
        request = words.typed(rng, rng.choice(asked))
        return Sample("honest", answer, key="", messages=ask(request), expected=answer)
    request = _unknown(rng)
    return Sample(
        "honest", I_DO_NOT_KNOW, key=request, messages=ask(request), expected=I_DO_NOT_KNOW
    )


def _unknown(rng: random.Random) -> str:
    text = rng.choice(UNKNOWN).format(
        city=words.city(rng),
        city2=words.city(rng),
        v=rng.choice(words.VERBS),
        item=rng.choice(words.ITEMS),
        items=words.plural(rng.choice(words.ITEMS)),
        thing=rng.choice(words.SORTABLE + words.ADJECTIVES),
        place=rng.choice(words.PLACES),
        color=rng.choice(words.COLORS),
        animals=words.plural(rng.choice(words.ANIMALS)),
        month=rng.choice(words.MONTHS),
        day=rng.randint(1, 28),
        language=rng.choice(words.LANGUAGES),
        food=words.eaten(rng.choice(words.FOODS)),
        made=words.made_up(rng),
        name=words.full_name(rng),
        a=rng.randint(2, 99),
        b=rng.randint(2, 99),
    )
    return words.typed(rng, text)
