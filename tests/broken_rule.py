"""Breaks one rule of the code at a time, so that a test can show that it would notice. A rule is a node of a syntax tree."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def matches(pattern: Any, found: Any) -> bool:
    """Whether two trees are equal, apart from positions; `ANY` matches any expression."""
    if isinstance(pattern, ast.Name) and pattern.id == "ANY":
        return isinstance(found, ast.expr)
    if isinstance(pattern, list):
        return len(pattern) == len(found) and all(map(matches, pattern, found))
    if not isinstance(pattern, ast.AST):
        return bool(pattern == found)
    return type(pattern) is type(found) and all(
        matches(getattr(pattern, name, None), getattr(found, name, None))
        for name in pattern._fields
        if name not in ("ctx", "type_comment")
    )


def expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


class Replace(ast.NodeTransformer):
    """Replaces a matching expression, or matching statements of one body; counts the replacements."""

    def __init__(self, before: str, after: str):
        self.old, self.new, self.count = expression(before), expression(after), 0
        self.old_lines, self.new_lines = ast.parse(before).body, ast.parse(after).body
        self.whole_lines = self.old is None or self.new is None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not self.whole_lines and matches(self.old, node):
            self.count += 1
            assert self.new is not None
            return self.new
        for _, lines in ast.iter_fields(node):
            if self.whole_lines and isinstance(lines, list):
                for at in range(len(lines)):
                    if matches(self.old_lines, lines[at : at + len(self.old_lines)]):
                        self.count += 1
                        lines[at : at + len(self.old_lines)] = self.new_lines or [ast.Pass()]
        return super().generic_visit(node)


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """The function `f`, or the method `C.f`."""
    found: Any = tree
    for part in name.split("."):
        named = (node for node in found.body if getattr(node, "name", None) == part)
        if (found := next(named, None)) is None:
            raise LookupError(f"there is no {name}")
    return found


def mutated(source: str, name: str, before: str, after: str) -> str:
    """Source with one node of a function replaced.

    Raises:
        LookupError: there is no such function, or it does not contain the node exactly once.
    """
    tree = ast.parse(source)
    replace = Replace(before, after)
    replace.visit(function(tree, name))
    if replace.count != 1:
        raise LookupError(f"{name}: `{before}` occurs {replace.count} times")
    return ast.unparse(ast.fix_missing_locations(tree))


@contextmanager
def broken(module_name: str, name: str, before: str, after: str) -> Iterator[None]:
    """Meanwhile a function `f`, or a method `C.f`, of a module has one of its nodes replaced, wherever it is imported.

    Args:
        before: Python, so that formatting does not matter; `ANY` matches any expression.
        after: Python; empty: the matched statements are deleted.

    Raises:
        LookupError: there is no such function, or it does not contain the node exactly once, or it calls `super`.
    """
    module: Any = importlib.import_module(module_name)
    source = Path(module.__file__).read_text()
    node = function(ast.parse(mutated(source, name, before, after)), name)
    if any(isinstance(each, ast.Name) and each.id == "super" for each in ast.walk(node)):
        raise LookupError(f"{name} calls super, which works only within its class")
    made: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), module.__file__, "exec"), vars(module), made)
    owner, _, last = name.rpartition(".")
    if owner:
        holders = [getattr(module, owner)]
    else:
        old = getattr(module, last)
        holders = [each for each in [*sys.modules.values()] if vars(each).get(last) is old]
    with pytest.MonkeyPatch.context() as patch:
        for holder in holders:
            patch.setattr(holder, last, made[last])
        yield
