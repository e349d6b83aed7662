"""Writes short stories from a grammar with a small world: who, where, what, and how it ends.

A plot is a list of beats, a beat a list of ways to say it. Slots agree in name and pronoun throughout.
"""

import random

from tools.tiny_model import words
from tools.tiny_model.sample import Sample, ask

OPENINGS = [
    "Once upon a time, there was {a_d} {d} {k} named {n}.",
    "Once upon a time, {a_d} {d} {k} named {n} lived near the {p2}.",
    "Once upon a time, in a {l} far away, lived {a_d} {d} {k} called {n}.",
    "Once upon a time there was {a_k} {k} whose name was {n}.",
]
HABITS = [
    "{n} loved to {v}. ",
    "Every day {he} liked to {v} in the {p2}. ",
    "{He} had {a_c} {c} {i2} and took it everywhere. ",
    "{n} was very {d2}. ",
    "",
]
PLOTS = {
    "lost": [
        [
            "One {day}, {n} lost {his} {c} {o}.",
            "But one morning {his} {c} {o} was gone.",
            "One day {he} could not find {his} {c} {o}.",
        ],
        [
            "{He} looked in the {q}, but it was not there.",
            "{He} looked under the bed and in the {q}. There was no {o}.",
            "{n} was sad and looked for it in the {q}.",
        ],
        [
            'Then {he} met {m}, {a_j} {j}. "Do not cry," said {m}. "I will help you."',
            '{m} the {j} came by. "Why are you sad?" asked {m}. "I lost my {o}," said {n}.',
            "{n} asked {his} friend {m} the {j} for help.",
        ],
        [
            "They looked in the {r} and there it was!",
            "Together they went to the {r}. The {o} was behind a big tree.",
            "At last {m} found the {o} in the {r}.",
        ],
        [
            '"Thank you, {m}!" said {n}. They were happy and ate some {f}.',
            "{n} hugged {m}. From that day on they were best friends.",
            '"You are a good friend," said {n}, and they played until it was dark.',
        ],
    ],
    "rain": [
        [
            "One {day}, it began to rain.",
            "One day dark clouds came and the wind was loud.",
            "One evening there was a big storm.",
        ],
        [
            "{n} was in the {p2} and got very wet.",
            "{n} was far from home and was afraid.",
            "{n} ran to the {p2}, but there was no roof.",
        ],
        [
            'A {j} named {m} saw {him}. "Come in," said {m}. "My house is warm."',
            'Then {m} the {j} opened a door. "You can stay with me," {she} said.',
        ],
        [
            "{m} gave {him} some {f} and a dry coat.",
            "They sat by the fire and ate {f}.",
            "They drank tea, and {m} told a funny story.",
        ],
        [
            "When the sun came back, {n} said thank you and went home with a smile.",
            "The next day the sky was blue, and they went to the {r} to play.",
            "{n} never forgot how kind {m} was.",
        ],
    ],
    "share": [
        [
            "One {day}, {n} found a big {g} in the {q}.",
            "One day {his} mother gave {him} a sweet {g}.",
            "One morning {n} got a very good {g}.",
        ],
        [
            'A hungry {j} came along. "My name is {m}," {she} said. "May I have some?"',
            "{m} the {j} sat on the grass. {She} had nothing to eat.",
        ],
        [
            '"No, it is mine," said {n}. {m} went away and was sad.',
            "At first {n} did not want to share it.",
            "{n} thought for a while. The {g} was not very big.",
        ],
        [
            'But then {n} felt bad. "Wait!" {he} said. "You can have half of it."',
            "Then {n} cut it in two and gave one half to {m}.",
        ],
        [
            "They ate together in the {r}. It tasted better than ever.",
            '"Thank you," said {m}. "You are kind." And {n} was happy.',
            "{n} learned that it is good to share.",
        ],
    ],
    "brave": [
        [
            "One {day}, {n} heard a small voice in the {r}.",
            "One day {n} walked to the {r} and heard a cry.",
        ],
        [
            '"Help!" it said. It was {m}, a little {j}, who had fallen into a hole.',
            "It was {m} the {j}. {She} was up in a tree and could not come down.",
            "There was {m} the {j}, who could not swim, in the deep water.",
        ],
        [
            "{n} was afraid, but {he} did not run away.",
            '{n} took a deep breath. "I can do it," {he} said.',
        ],
        [
            "{He} took {a_s} {s} and pulled {m} out.",
            "{He} found a long rope, and soon {m} was safe.",
        ],
        [
            '"You are so brave!" said {m}. {n} smiled all day.',
            "All the animals heard of it, and they gave {n} {a_c} {c} {o}.",
            "After that, {n} was not afraid of the {r} any more.",
        ],
    ],
    "learn": [
        [
            "{n} wanted to learn to {w}, but {he} did not know how.",
            "One {day}, {n} saw {m} the {j} {w} in the {q}.",
        ],
        [
            '"Can you teach me to {w}?" {he} asked {m} the {j}.',
            "{He} went to {m}, {a_j} {j} who could {w} very well.",
        ],
        [
            '"It is not easy," said {m}. "You must try again and again."',
            "The first time {he} fell down. Everybody laughed.",
            "{He} tried once, and {he} tried twice, but it did not work.",
        ],
        [
            "But {n} did not stop. {He} tried every day.",
            "Day after day they went to the {r} to try.",
        ],
        [
            "In the end {he} could {w} as well as {m}. {n} was very proud.",
            'At last it worked! "I can {w}!" said {n}, and {m} clapped.',
        ],
    ],
    "gift": [
        [
            "It was the birthday of {m} the {j}, and {n} had no gift.",
            "One {day}, {n} wanted to give {his} friend {m} the {j} a gift.",
        ],
        [
            "{He} went to the {q} and looked for something nice.",
            "{He} had only one coin. It was not enough for {a_c} {c} {o}.",
        ],
        [
            "So {he} made {a_c} {c} {o} out of wood.",
            "Then {he} found {a_c} {c} {o}. It was beautiful.",
        ],
        [
            "{n} put the {o} in a box and took it to {m}.",
            "In the evening {he} gave the {o} to {m}.",
        ],
        [
            '"It is the best gift of all," said {m}.',
            "{m} was so happy that {she} danced in the {r}.",
            "They ate {f} and sang until the moon came up.",
        ],
    ],
    "trip": [
        [
            "One {day}, {n} and {his} friend {m} the {j} went to the {q}.",
            "One day {n} asked {m} the {j} to come with {him} to the {q}.",
        ],
        [
            "They took some {f} and {a_c} {c} {o}.",
            "The way was long, and they sang a song.",
        ],
        [
            "Near the {r} they lost their way.",
            "Soon it was dark, and they did not know where they were.",
        ],
        [
            "A wise old owl showed them the way home.",
            "{n} saw a light in the window. It was {his} house!",
            "{m} looked at the stars and found the way.",
        ],
        [
            '"What a day!" said {m}. They slept very well that night.',
            '"Next time we take a map," said {n}, and they both laughed.',
        ],
    ],
}
ENDINGS = ["", "", " The end.", " And they all lived happily."]
QUESTIONS = ["lost", "share", "gift"]


def _places(rng: random.Random) -> tuple[str, str, str]:
    """Return a place of any sort, and two others under the sky."""
    q = rng.choice(words.SCENES)
    r, p2 = rng.sample([place for place in words.OUTDOORS if place != q], 2)
    return q, r, p2


def world(rng: random.Random, kind: str | None = None, hero: str = "") -> dict[str, str]:
    """Draw who and what a story is about; no two of a sort are the same."""
    girl = hero in words.GIRLS if hero else rng.random() < 0.5
    hero = hero or rng.choice(words.HEROINES if girl else words.BOYS)
    friend = rng.choice([name for name in words.FRIENDS if name != hero])
    kinds = rng.sample(words.ANIMALS, 2)
    kind = kind or (rng.choice(["girl" if girl else "boy"]) if rng.random() < 0.2 else kinds[0])
    other = kinds[1] if kinds[1] != kind else kinds[0]
    q, r, p2 = _places(rng)
    o, i2 = rng.sample(words.ITEMS, 2)
    d, d2 = rng.sample(words.ADJECTIVES[:18], 2)
    v, w = rng.sample(words.VERBS, 2)
    c = rng.choice(words.COLORS)
    he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
    facts = dict(n=hero, m=friend, k=kind, j=other, q=q, r=r, p2=p2, o=o, i2=i2, d=d, d2=d2)
    facts |= dict(l=rng.choice(words.LAIRS), s=rng.choice(words.RESCUERS))
    facts |= dict(
        v=v,
        w=w,
        c=c,
        f=rng.choice(words.MASS),
        g=rng.choice(words.SOLID),
        day=rng.choice(["day", "sunny day", "morning"]),
    )
    facts |= dict(
        he=he, him=him, his=his, He=he.capitalize(), His=his.capitalize(), she="she", She="She"
    )
    for slot, word in (("d", d), ("k", kind), ("j", other), ("c", c), ("o", o), ("s", facts["s"])):
        facts[f"a_{slot}"] = words.article(word)
    return facts


def write(
    rng: random.Random, kind: str | None = None, plot: str | None = None, hero: str = ""
) -> tuple[str, dict[str, str], str]:
    """Return a story, its world and the name of its plot."""
    facts = world(rng, kind, hero)
    plot = plot or rng.choice(list(PLOTS))
    said = rng.choice(OPENINGS) + " " + rng.choice(HABITS)
    said += " ".join(rng.choice(beat) for beat in PLOTS[plot]) + rng.choice(ENDINGS)
    return said.format(**facts), facts, plot


def raw(rng: random.Random) -> Sample:
    """A story as plain text, ended by the end-of-text token."""
    text, _, _ = write(rng)
    return Sample("story", text, key=text)


ASKS = [
    "Tell me a story about {about}.",
    "Tell me a short story about {about}.",
    "Write a story about {about}.",
    "Can you tell a story about {about}?",
    "I want a story about {about}, please.",
    "Write a short story about {about}.",
    "Tell a story about {about}.",
    "Tell me a bedtime story about {about}.",
    "Make up a story about {about}.",
    "Please tell me a story about {about}.",
    "A story about {about}, please.",
]

ANY_STORY = ["Tell me a story.", "Tell me a short story.", "Write a story for me."]


def told(rng: random.Random) -> Sample:
    """A story on request."""
    if rng.random() < 0.15:
        text, facts, _ = write(rng)
        request = words.typed(rng, rng.choice(ANY_STORY))
        return Sample("story_chat", text, key=text, messages=ask(request), expected=facts["n"])
    draw = rng.random()
    kind = rng.choice(words.ANIMALS if draw < 0.65 else words.HEROES)
    if draw > 0.95:
        kind = words.made_up(rng)
    hero = rng.choice(words.HEROINES + words.BOYS) if rng.random() < 0.3 else ""
    text, facts, _ = write(rng, kind, hero=hero)
    about = f"{words.article(kind)} {kind}" + (f" named {hero}" if hero else "")
    if not hero and rng.random() < 0.2:
        about = f"{facts['a_d']} {facts['d']} {kind}"
    elif not hero and rng.random() < 0.15:
        about += f" and {facts['a_j']} {facts['j']}"
    request = words.typed(rng, rng.choice(ASKS).format(about=about))
    return Sample("story_chat", text, key=text, messages=ask(request), expected=kind)


def question(rng: random.Random) -> Sample:
    """Questions about a story in the context; the answers stand in the story."""
    plot = rng.choice(QUESTIONS)
    text, facts, _ = write(rng, plot=plot)
    pairs = [
        (f"What kind of animal is {facts['m']}?", f"{facts['m']} is {facts['a_j']} {facts['j']}."),
        ("What is the name of the hero?", f"The name is {facts['n']}."),
        ("Who is the story about?", f"It is about {facts['n']}."),
    ]
    if plot == "lost":
        pairs.append(
            (f"What did {facts['n']} lose?", f"{facts['n']} lost {facts['a_o']} {facts['o']}.")
        )
    (asked, answer), *more = rng.sample(pairs, rng.choice([1, 1, 2, 3]))
    messages = ask(f"Read this story.\n\n{text}\n\n{asked}")
    for asked, after in more:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": asked}]
        answer = after
    key = "".join(message["content"] for message in messages)
    return Sample("question", answer, key, messages, expected=answer, every_turn=True)
