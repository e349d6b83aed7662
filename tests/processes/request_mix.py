"""Requests of every kind, drawn: what clients may ask for, alone and together, and how they may leave.

Knows the bodies of the API. Does not know what the answers say: each must come, and have an end.
"""

from __future__ import annotations

import random
from typing import Any

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<a>"},
            {"type": "json_schema", "json_schema": {"type": "integer"}},
            {"type": "regex", "pattern": "[xy]{1,3}</a>"},
        ],
    },
}


def constraint(draw: random.Random) -> dict[str, Any]:
    """One that was asked for before, or a new one; some cannot be kept."""
    new = draw.randrange(1, 400)
    return draw.choice(
        [
            {"regex": "ab"},
            {"regex": f"[a-z]{{1,{new}}}-{new}"},
            {"regex": "(a|b)*c" * draw.choice((1, 2, 9))},
            {"regex": "("},
            {"choice": ["red", "green", f"n{new}"]},
            {"json": PERSON},
            {"json": {"type": "integer", "maximum": new}},
            {"json": {"type": "array", "items": {"$ref": "#"}}},
            {"json": {"allOf": [{"not": {}}]}},
            {"json_object": True},
            {"grammar": 'root ::= "(" item ("," item)* ")"\nitem ::= [a-c] | root\n'},
            {"grammar": f'start: "n=" NUM ";"\nNUM: /[1-9][0-9]{{0,{new}}}/\n'},
            {"grammar": "root ::= "},
            {"structural_tag": TAG},
        ]
    )


def body(draw: random.Random, tokens: int = 400) -> tuple[str, dict[str, Any]]:
    """A path and what is asked of it. `tokens`: how many the vocabulary has, at least."""
    path = draw.choice((TEXT, TEXT, CHAT))
    words = "Once upon a time, " * draw.choice((0, 1, 1, 3, 9, 30, 300)) + str(draw.randrange(9))
    asked: dict[str, Any] = {"max_tokens": draw.choice((1, 1, 2, 5, 17, 40, 90))}
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": words}]
    else:
        asked["prompt"] = draw.choice((words, words, words, [words, "why"], [1, 2, 3], []))

    def perhaps(chance: float, **more: Any) -> None:
        if draw.random() < chance:
            asked.update(more)

    id = draw.randrange(tokens)
    perhaps(0.5, stream=True)
    perhaps(0.5, ignore_eos=True)
    perhaps(0.4, structured_outputs=constraint(draw))
    perhaps(0.2, allowed_token_ids=[id, draw.randrange(tokens)][: draw.choice((1, 2))])
    perhaps(0.2, n=draw.choice((2, 3)))
    perhaps(0.4, temperature=draw.choice((0, 0.7, 2)))
    perhaps(0.2, stop=draw.choice(("e", " ", ["the", "\n"])))
    perhaps(0.1, include_stop_str_in_output=True)
    perhaps(0.2, priority=draw.choice((-5, -1, 1, 7)))
    perhaps(0.1, timeout=draw.choice((0.001, 0.05, 0.5, 20)))
    perhaps(0.2, request_id=f"same-{draw.randrange(4)}")
    perhaps(0.1, prompt_logprobs=draw.choice((0, 2)))
    perhaps(0.1, seed=draw.randrange(99))
    perhaps(0.1, min_tokens=draw.choice((1, 3, 99)))
    perhaps(0.1, stop_token_ids=[id])
    perhaps(0.1, logit_bias={str(id): draw.choice((-100, 100))})
    perhaps(0.1, bad_words=["the", " a"])
    perhaps(0.1, repetition_penalty=1.5)
    perhaps(0.1, stream_interval=draw.choice((1, 3, 50)))
    perhaps(0.05, cache_salt=str(draw.randrange(3)))
    if path == TEXT:
        perhaps(0.1, echo=True)
        perhaps(0.1, logprobs=draw.choice((0, 2)))
        perhaps(0.1, best_of=3)
    else:
        perhaps(0.1, logprobs=True, top_logprobs=2)
        perhaps(0.1, response_format={"type": "json_object"})
    return path, asked
