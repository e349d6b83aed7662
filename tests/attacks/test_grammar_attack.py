"""Grammars that never finish compiling, or use up a core or the machine's memory (C2)."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import httpx
import pytest
from attacked_server import CHAT, TEXT, AttackedServer, note, together

PRIMES = (999983, 999979, 999961, 999959, 999953)
LEAVES_S = 5.0
ANSWERED_S = 20.0
PAUSE_S = 0.2  # between an attacker's requests: only their grammars shall be the attack
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}  # fmt: skip
MESSAGES = [{"role": "user", "content": "hi"}]


def multiples(shift: int) -> dict[str, Any]:
    """A schema for a number that is a multiple of five large primes, in one of their orders."""
    order = PRIMES[shift:] + PRIMES[:shift]
    schema = {"allOf": [{"type": "integer", "multipleOf": one} for one in order]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": MESSAGES, "max_tokens": 8, "response_format": form}


def regex(pattern: str) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": pattern}}


def left(server: AttackedServer, path: str, body: Any, timeout: float = LEAVES_S) -> int | None:
    """The status; None: the client disconnected before there was one."""
    try:
        with httpx.Client(base_url=server.url, timeout=timeout) as own:
            return own.post(path, json=body).status_code
    except httpx.TimeoutException:
        return None


def structured_still_works(server: AttackedServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = {"messages": MESSAGES, "max_tokens": 20}
    for more in ({"response_format": form}, {"tools": [TOOL]}):
        assert server.ask(CHAT, asked | more, ANSWERED_S).status_code == 200


def test_multiples_of_large_primes_are_refused(server: AttackedServer):
    with server.attack(seconds=60) as measured:
        answer = server.ask(CHAT, multiples(0), ANSWERED_S)
        assert answer.status_code == 400
        structured_still_works(server)
    measured.check()


@pytest.mark.attack
def test_uncompilable_schemas_do_not_affect_other_requests(server: AttackedServer):
    with server.attack(seconds=120) as measured:
        together(4, lambda number: left(server, CHAT, multiples(number)))
        structured_still_works(server)
        cores = server.cores()
        note(f"{cores:.2f} cores with nobody connected")
        assert cores < 0.5
    measured.check()


@pytest.mark.attack
def test_nested_repetitions_do_not_slow_a_stream(server: AttackedServer):
    """Each is new, so that none is cached."""
    bombs = [
        "((((a{100}){100}){100}){100})", "(a{1000}){1000}", "((((a{60}){60}){60}){60})",
        "(((a|b){99}){99}){99}", "(.{0,1000}){0,1000}", "[a-z]{1,1000}[a-z]{1,1000}[0-9]{1,1000}",
    ]  # fmt: skip
    numbers = itertools.count()

    def attack(over: threading.Event) -> None:
        def go(_: int) -> None:
            while not over.is_set():
                number = next(numbers)
                left(server, TEXT, regex(bombs[number % len(bombs)] + "x" * (number + 1)))
                over.wait(PAUSE_S)

        together(4, go)

    with server.attack(seconds=300) as measured:
        gaps = server.gaps_beside(attack, rounds=3, tokens=400)
        note(str(gaps), f"{next(numbers)} grammars")
        structured_still_works(server)
    measured.check()
    assert gaps.ratio < 2, str(gaps)


def later(number: int) -> dict[str, Any]:
    """Its first masks are small. After the second token, it forces gigabytes of text."""
    text = f"{number}" + "a" * 4000
    items = {"prefixItems": [{"enum": [1, 2]}], "items": {"const": text}, "minItems": 10**6}
    form = {"json": {"type": "array", **items}, "disable_any_whitespace": True}
    return {"prompt": "a", "max_tokens": 16, "structured_outputs": form}


def doubling(number: int) -> dict[str, Any]:
    """Its rules are short for a size check. Together they force gigabytes of text at once."""
    rules = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(20))
    text = f'start: r0\n{rules}\nr20: "{number}{"a" * 4000}"'
    return {"prompt": "a", "max_tokens": 4, "structured_outputs": {"grammar": text}}


@pytest.mark.attack
@pytest.mark.parametrize("bomb", [later, doubling])
def test_bombs_that_no_sum_finds_do_not_slow_a_stream(server: AttackedServer, bomb: Any):
    """One client sends one bomb after the other, each new."""
    numbers = itertools.count()

    def attack(over: threading.Event) -> None:
        while not over.is_set():
            left(server, TEXT, bomb(next(numbers)), ANSWERED_S)
            over.wait(PAUSE_S)

    with server.attack(seconds=300) as measured:
        gaps = server.gaps_beside(attack, rounds=2, tokens=200)
        note(str(gaps), f"{next(numbers)} grammars")
        structured_still_works(server)
    measured.check()
    assert gaps.ratio < 2, str(gaps)


@pytest.mark.attack
@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "a" * (1 << 20)},
        {"choice": ["b" * (1 << 20), "c"]},
        {"grammar": "start: A\nA: /(a{1000}){1000}/\n"},
        {"grammar": "root ::= " + " | ".join(f'"w{number}"' for number in range(100_000))},
        {"json": {"type": "string", "pattern": "^((a{500}){500}){500}$"}},
        {"json": {"type": "string", "minLength": 10**9}},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    ],
    ids=["regex", "choice", "lark", "gbnf", "pattern", "length", "items"],
)
def test_one_large_grammar_does_not_slow_a_stream(server: AttackedServer, constraint: dict[str, Any]):  # fmt: skip
    def attack(over: threading.Event) -> None:
        body = {"prompt": "a", "max_tokens": 4, "structured_outputs": constraint}
        statuses = []
        while not over.is_set():
            statuses.append(left(server, TEXT, body, ANSWERED_S))
            over.wait(PAUSE_S)
        note(f"statuses {statuses[:9]}")

    with server.attack(seconds=180) as measured:
        gaps = server.gaps_beside(attack, rounds=2, tokens=400)
        note(str(gaps))
        structured_still_works(server)
    measured.check()
    assert max(gaps.beside) < 2, str(gaps)
