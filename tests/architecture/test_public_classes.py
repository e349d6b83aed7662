"""Each public class name is defined once in src/, so a search for it has one answer."""

from __future__ import annotations

import ast
from collections import defaultdict

from source_rules import File, source_files


def repeated_classes(files: list[File]) -> dict[str, list[str]]:
    """Public class name -> the files that define it, where several do."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(file.path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_two_public_classes_share_a_name():
    assert repeated_classes(source_files()) == {}


def test_a_repeated_class_is_reported():
    first, second = File("quire/a.py", "class Plan: ..."), File("quire/b.py", "class Plan: ...")
    assert repeated_classes([first, second]) == {"Plan": ["quire/a.py", "quire/b.py"]}
    assert repeated_classes([first, File("quire/b.py", "class _Plan: ...")]) == {}
