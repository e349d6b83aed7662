"""No two modules import each other, also not inside functions or for type annotations."""

from __future__ import annotations

from source_rules import File, imports, source_files

FACADE = "quire/__init__.py"
"""The public names, which modules above import lazily; no module imports a name from it."""


def graph(files: list[File]) -> dict[str, set[str]]:
    """Module -> the modules of `files` that it imports."""
    names = {file.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in files}  # fmt: skip
    found = {}
    for file in files:
        name = file.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        found[name] = {module for target in imports(file) for module in (target, target.rpartition(".")[0]) if module in names} - {name}  # fmt: skip
    return found


def circles(edges: dict[str, set[str]]) -> list[str]:
    """The modules that are left when those that import no others of the rest are removed again and again."""
    left = dict(edges)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_modules_form_no_circles():
    assert circles(graph([file for file in source_files() if file.path != FACADE])) == []


def test_a_circle_is_found():
    files = [
        File("quire/server/a.py", "def f():\n    from quire.server.b import g\n"),
        File("quire/server/b.py", "import quire.server.c\n"),
        File("quire/server/c.py", "from quire.server import a\n"),
        File("quire/server/d.py", "import os\n"),
    ]
    assert circles(graph(files)) == ["quire.server.a", "quire.server.b", "quire.server.c"]
