"""Names: each public class name is defined once in src/, and no name is a lone word that says what happened to a thing."""

from __future__ import annotations

import ast
from collections import defaultdict

from source_rules import File, source_files

PARTICIPLES = frozenset(
    "told held asked kept found taken made wanted said given stored placed drawn picked noted watched recorded guarded"
    " measured begun ended left rested seen turned unturned whole apart foretold obeyed lent".split()
)
"""Words for what happened to a thing, not for what it is. Names of vLLM's and PyTorch's API are not among them."""


WORDS = frozenset(
    "told asked held given kept wanted taken made said placed drawn picked noted watched begun gone away alike near far"
    " togo ours theirs mine".split()
)
"""Words that no parameter, attribute, field or function may be named by alone, with or without underscores."""

CORE = ("scheduler worker kvcache native models layers engine executor processes protocol").split()
"""Packages in which the words name no local variable either."""


def public_names(file: File) -> list[tuple[str, ast.AST]]:
    """Classes and functions at the top of a module whose names do not begin with an underscore."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        (n.name, n) for n in file.tree.body if isinstance(n, kinds) and not n.name.startswith("_")
    ]


def repeated_classes(files: list[File]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for name, node in public_names(file):
            if isinstance(node, ast.ClassDef):
                places[name].append(file.path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def participles(files: list[File]) -> list[str]:
    return [
        f"{file.path}: {name}"
        for file in files
        for name, _ in public_names(file)
        if name.lower() in PARTICIPLES
    ]


def lone_words(file: File) -> list[str]:
    """`path:line: name` of each parameter, attribute, field and function; in the core also of each local variable."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(file.tree):
        match node:
            case ast.arg(arg=name, lineno=line):
                names.append((line, name))
            case ast.Attribute(attr=name, ctx=ast.Store(), lineno=line):
                names.append((line, name))
            case (
                ast.FunctionDef(name=name, lineno=line)
                | ast.AsyncFunctionDef(name=name, lineno=line)
            ):
                names.append((line, name))
            case ast.ClassDef(body=body):
                fields = (line.target for line in body if isinstance(line, ast.AnnAssign))
                names += [
                    (field.lineno, field.id) for field in fields if isinstance(field, ast.Name)
                ]
            case ast.Name(id=name, ctx=ast.Store(), lineno=line) if file.package in CORE:
                names.append((line, name))
    words = {(line, name) for line, name in names if name.strip("_").lower() in WORDS}
    return [f"{file.path}:{line}: {name}" for line, name in sorted(words)]


def test_no_two_public_classes_share_a_name():
    assert repeated_classes(source_files()) == {}


def test_no_public_name_is_a_lone_participle():
    assert participles(source_files()) == []


def test_both_faults_are_seen():
    first, second = File("quire/a.py", "class Plan: ..."), File("quire/b.py", "class Plan: ...")
    assert repeated_classes([first, second]) == {"Plan": ["quire/a.py", "quire/b.py"]}
    assert repeated_classes([first, File("quire/b.py", "class _Plan: ...")]) == {}
    assert participles([File("quire/c.py", "def told(): ...\ndef told_step(): ...")]) == [
        "quire/c.py: told"
    ]


def test_no_parameter_attribute_or_function_is_a_lone_word():
    assert [line for file in source_files() for line in lone_words(file)] == []


def test_lone_words_are_seen():
    source = (
        "class A:\n  held: int\n  def _asked(self, told, num_told):\n    self._away = given = 1\n"
    )
    found = ["held", "_asked", "told", "_away"]
    lines = [2, 3, 3, 4]
    named = [f"quire/server/a.py:{line}: {name}" for line, name in zip(lines, found, strict=True)]
    assert sorted(lone_words(File("quire/server/a.py", source))) == sorted(named)
    assert "quire/worker/a.py:4: given" in lone_words(File("quire/worker/a.py", source))
