"""Each package keeps to its budget of code lines: the table of docs/design/budget.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache

from source_rules import ROOT, SOURCE, source_files

PAGE = ROOT / "docs" / "design" / "budget.md"
WHOLE_PYTHON, WHOLE_CPP = 58_000, 8_000
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def python_lines(text: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def cpp_lines(text: str) -> int:
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith("//"))


@cache
def counted() -> Counter[str]:
    lines: Counter[str] = Counter()
    for file in source_files():
        if file.path.startswith("quire/"):
            package = file.package if file.path.count("/") > 1 else "root"
            lines[package] += python_lines(file.text)
    for path in [*SOURCE.rglob("*.cpp"), *SOURCE.rglob("*.h")]:
        lines["C++"] += cpp_lines(path.read_text(encoding="utf-8"))
    return lines


def limits() -> dict[str, tuple[int, int]]:
    """Package -> its limits of lines: now, and when all features exist."""
    rows = re.findall(
        r"^\| `?([\w+]+)`? \| (\d+) \| (\d+) \|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    return {name: (int(now), int(whole)) for name, now, whole in rows}


def over(lines: Counter[str], most: dict[str, tuple[int, int]]) -> list[str]:
    return [
        f"{name}: {count} code lines, at most {most.get(name, (0, 0))[0]}; make it smaller, or give a reason in {PAGE.name}"
        for name, count in sorted(lines.items())
        if count > most.get(name, (0, 0))[0]
    ]


def test_every_package_is_within_its_budget():
    lines, most = counted(), limits()
    print(f"\n{'package':14}{'lines':>7}{'now':>7}{'whole':>7}")
    for name, count in sorted(lines.items()):
        print(f"{name:14}{count:7}{most[name][0]:7}{most[name][1]:7}")
    print(f"{'Python':14}{lines.total() - lines['C++']:7}")
    assert over(lines, most) == []
    assert set(most) == set(lines)
    assert all(now <= whole for now, whole in most.values())


def test_the_wheel_is_within_its_budget():
    whole = {name: whole for name, (_, whole) in limits().items()}
    assert whole.pop("C++") <= WHOLE_CPP
    assert sum(whole.values()) <= WHOLE_PYTHON
    assert counted().total() - counted()["C++"] <= WHOLE_PYTHON


def test_core_files_are_within_their_ceilings():
    rows = re.findall(r"^\| `(\w+/\w+\.py)` \| (\d+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {name for name, _ in rows} == {
        "scheduler/scheduler.py", "engine/core.py", "worker/worker.py",
    }  # fmt: skip
    for name, most in rows:
        lines = python_lines((SOURCE / "quire" / name).read_text(encoding="utf-8"))
        assert lines <= int(most), (
            f"{name}: {lines} code lines, at most {most}; give the feature a joint"
        )


def test_code_lines_are_counted_and_excess_is_found():
    text = '"""Doc."""\n\n# why\nx = """two\nlines"""\n\n\ndef f():\n    """Doc."""\n    return x\n'
    assert python_lines(text) == 4
    assert cpp_lines("// a\n\n/* b\n c */\nint x; // d\n") == 1
    assert over(Counter({"a": 2, "b": 1}), {"a": (1, 1), "b": (1, 1)})[0].startswith(
        "a: 2 code lines, at most 1"
    )
