"""Public names: each class name is defined once in src/, and no public name is a lone participle."""

from __future__ import annotations

import ast
from collections import defaultdict

from source_rules import File, source_files

PARTICIPLES = frozenset(
    "told held asked kept found taken made wanted said given stored placed drawn picked noted watched recorded guarded"
    " measured begun ended left rested seen turned unturned whole apart foretold obeyed lent".split()
)
"""Words for what happened to a thing, not for what it is. Names of vLLM's and PyTorch's API are not among them."""


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
