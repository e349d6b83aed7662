"""Docstrings, messages and help in src/ avoid idioms that hide which component acts (CONTRIBUTING, how to write code)."""

from __future__ import annotations

import ast
import re

from source_rules import File, source_files

IDIOMS = re.compile(
    r"\b(whoever|nobody|somebody|for whom|of whom|(?:is|are|was|were|be) told|as (?:it|they) (?:lies?|stands?)"
    r"|lets? go of|gives? way|makes? way|made anew|at most \S+ (?:is|are) taken)\b",
    re.IGNORECASE,
)
ALLOWED: dict[str, str] = {}
"""File -> why one of the words is meant there."""


def idioms(file: File) -> list[str]:
    """`path:line: the words` of each string in which an idiom occurs."""
    strings = (n for n in ast.walk(file.tree) if isinstance(n, ast.Constant))
    return [
        f"{file.path}:{n.lineno}: {found[0]}"
        for n in strings
        if isinstance(n.value, str) and (found := IDIOMS.search(" ".join(n.value.split())))
    ]


def test_messages_and_docstrings_contain_no_idiom():
    found = [line for file in source_files() if file.path not in ALLOWED for line in idioms(file)]
    assert found == []


def test_an_idiom_is_seen():
    source = 'def f():\n    """Ends what nobody\n    reads."""\n    raise E(f"{x}: the worker is told")\n'
    assert idioms(File("quire/a.py", source)) == ["quire/a.py:2: nobody", "quire/a.py:4: is told"]
    assert (
        idioms(File("quire/a.py", 'raise E("the engine has stopped")  # nobody reads this')) == []
    )
