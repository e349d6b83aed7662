"""Every name that tests, tools, benchmarks and examples import from this repository exists. Imports inside functions are not read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from source_rules import ROOT, SOURCE

FOLDERS = ("tests", "tools", "benchmarks", "examples")
HERE = ("quire", "tests", "tools", "benchmarks")


def module_file(name: str) -> Path | None:
    """The file of a module of this repository; None: there is none."""
    place = (SOURCE if name.split(".")[0] == "quire" else ROOT).joinpath(*name.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.exists()), None)


@cache
def names_of(file: Path) -> set[str] | None:
    """The names that a module binds; None: the module has a `__getattr__`, which may make any name."""
    found = set[str]()
    for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name="__getattr__"):
                return None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found |= {(one.asname or one.name).split(".")[0] for one in node.names}
            case _:
                names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                found |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return found


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module that run when it is imported, without the bodies of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from statements(node)


def missing(tree: ast.AST) -> list[str]:
    """Names that a file imports from modules of this repository, and that they do not have."""
    found = []
    for node in statements(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in HERE:
            continue
        file = module_file(str(node.module))
        names = names_of(file) if file is not None else set[str]()
        for one in node.names if names is not None else ():
            if one.name not in names and module_file(f"{node.module}.{one.name}") is None:
                found.append(f"{node.module}.{one.name}")
    return found


def test_imported_names_exist():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    found = {str(file.relative_to(ROOT)): missing(ast.parse(file.read_text(encoding="utf-8"))) for file in files}  # fmt: skip
    assert {file: names for file, names in found.items() if names} == {}


def test_a_missing_name_is_seen():
    tree = ast.parse("from tests.kernel_builds import BUILDS, QUICK\nfrom quire.gone import x\nfrom quire import LLM, models")  # fmt: skip
    assert missing(tree) == ["tests.kernel_builds.QUICK", "quire.gone.x"]
