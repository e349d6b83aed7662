"""A method of a gate that has no name of `Gate`, and that its feature does not call, never runs: it has a wrong name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from source_rules import SOURCE

FEATURES = SOURCE / "quire" / "features"
CORE = ("scheduler", "kvcache", "engine")
KNOWN = ast.parse((SOURCE / "quire" / "scheduler" / "gate.py").read_text())


def text_of(*folders: Path) -> str:
    return "".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))


def methods(tree: ast.Module) -> list[str]:
    """Public methods of the gates in a file."""
    gates = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Gate")
    )
    found = (item for gate in gates for item in gate.body if isinstance(item, ast.FunctionDef))
    return [method.name for method in found if not method.name.startswith("_")]


def never_run(text: str, callers: str) -> list[str]:
    """Of the gates in a file, the methods that nothing calls. `callers`: the text of the feature and of the core."""
    names = set(methods(ast.parse(text))) - set(methods(KNOWN))
    return sorted(name for name in names if not re.search(rf"\.{name}\b", callers))


def test_each_method_of_a_gate_is_called() -> None:
    core = text_of(*(SOURCE / "quire" / name for name in CORE))
    for file in sorted(FEATURES.rglob("*.py")):
        feature = text_of(FEATURES / file.relative_to(FEATURES).parts[0])
        lost = never_run(file.read_text(), feature + core)
        assert not lost, f"{file.name}: {lost} are no methods of Gate (scheduler/gate.py)"


def test_a_wrong_name_is_found() -> None:
    text = "class SomeGate(Gate):\n    def learn(self, data):\n        pass\n"
    assert never_run(text, text) == ["learn"]
    assert never_run(text.replace("learn", "data_from_hook"), text) == []
    assert never_run(text, text + "gate.learn(b'')") == []
