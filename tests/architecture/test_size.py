"""The wheel stays under one ceiling of code lines; `pytest -s` prints the ten largest packages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache

from source_rules import SOURCE, source_files

PYTHON_CEILING, CPP_CEILING = 74_660, 8_000
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
def lines_by_package() -> Counter[str]:
    lines: Counter[str] = Counter()
    for file in source_files():
        if file.path.startswith("quire/"):
            package = file.package if file.path.count("/") > 1 else "root"
            lines[package] += python_lines(file.text)
    return lines


def test_the_wheel_is_under_its_ceiling():
    lines = lines_by_package()
    for name, count in lines.most_common(10):
        print(f"{name:14}{count:7}")
    print(f"{'Python':14}{lines.total():7}")
    assert lines.total() <= PYTHON_CEILING
    kernels = [*SOURCE.rglob("*.cpp"), *SOURCE.rglob("*.h")]
    assert sum(cpp_lines(path.read_text(encoding="utf-8")) for path in kernels) <= CPP_CEILING


def test_code_lines_are_counted():
    text = '"""Doc."""\n\n# why\nx = """two\nlines"""\n\n\ndef f():\n    """Doc."""\n    return x\n'
    assert python_lines(text) == 4
    assert cpp_lines("// a\n\n/* b\n c */\nint x; // d\n") == 1
