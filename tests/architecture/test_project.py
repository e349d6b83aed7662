"""The project around the source: pytest collects all tests, dependencies are declared, no private paths."""

from __future__ import annotations

import ast
import re
import sys
import tomllib

import pytest
from source_rules import ROOT, imports, source_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECISION = ROOT / "docs" / "decisions" / "0008-dependencies.md"

# Import names of distributions, if they differ from the distribution's name.
IMPORT_NAMES = {"pyzmq": "zmq", "pyyaml": "yaml", "python-multipart": "python_multipart"}
# Imported if installed, never required.
OPTIONAL = {
    "triton": "kernels of CUDA devices, which CUDA builds of torch bring along: pip install quire[cuda]",
    "sentencepiece": "tokenizers of old Llama and Gemma checkpoints: pip install quire[sentencepiece]",
    "ray": "ranks on the machines of a Ray cluster: pip install quire[ray]",
    "av": "sound of M4A and WebM files: pip install quire[audio]",
    "soundfile": "sound of FLAC, MP3 and OGG files: pip install quire[audio]",
    "soxr": "sound of other rates: pip install quire[audio]",
    "PIL": "pictures in requests: pip install quire[vision]",
    "matplotlib": "pictures of benchmarks (--plot): pip install quire[plot]",
    "runai_model_streamer": "checkpoints in object stores: pip install quire[runai]",
    "redis": "kv_remote_url: pip install quire[redis]",
}
# Places that exist only on the authors' machine.
PRIVATE = re.compile("/work" + r"/(shared|main|\.library)|/tmp/" + r"b/")
TEXTS = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".sh", ""}
SKIPPED = {".git", ".venv", "build", "dist", ".cache"}


def declared() -> set[str]:
    return {re.match(r"[\w-]+", line)[0].lower() for line in PROJECT["dependencies"]}


def undeclared(modules: set[str], known: set[str]) -> set[str]:
    """Top-level modules that are neither Quire's, nor Python's, nor declared."""
    return {m for m in modules if m not in sys.stdlib_module_names} - known


def test_every_import_is_declared():
    used = {name.split(".")[0] for file in source_files() for name in imports(file)}
    known = (
        {IMPORT_NAMES.get(name, name) for name in declared()} | set(OPTIONAL) | {"quire", "vllm"}
    )
    assert not undeclared(used, known)


def test_every_dependency_is_imported():
    used = {name.split(".")[0] for file in source_files() for name in imports(file)}
    assert {name for name in declared() if IMPORT_NAMES.get(name, name) not in used} == set()


def test_an_undeclared_import_is_seen():
    assert undeclared({"os", "numpy", "left_pad"}, {"numpy"}) == {"left_pad"}


def test_every_dependency_has_its_reason():
    explained = set(
        re.findall(r"^\| `([\w-]+)` \|", DECISION.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert explained == declared()


def test_the_sandbox_is_of_a_mended_jinja():
    """Before 3.1.6 a template could get out of Jinja's sandbox (CVE-2024-56326, CVE-2024-56201, CVE-2025-27516)."""
    (needed,) = (line for line in PROJECT["dependencies"] if line.startswith("jinja2"))
    least = tuple(int(part) for part in needed.partition(">=")[2].split("."))
    assert least >= (3, 1, 6)


def stray_tests(path: str, text: str) -> list[str]:
    """Tests that pytest would not collect, and test files without tests."""
    tree, name = ast.parse(text), path.rsplit("/", 1)[-1]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    tests = [n.name for n in ast.walk(tree) if isinstance(n, kinds) and n.name.startswith("test_")]
    if not name.startswith("test_"):
        return [f"{path}: {test} is never collected" for test in tests]
    return [] if tests else [f"{path}: no tests"]


def test_every_test_is_collected():
    files = {p.relative_to(ROOT).as_posix(): p.read_text() for p in ROOT.glob("tests/**/*.py")}
    assert files
    assert not [line for path, text in files.items() for line in stray_tests(path, text)]
    stems = [path.rsplit("/", 1)[-1] for path in files if not path.endswith("__init__.py")]
    assert not {stem for stem in stems if stems.count(stem) > 1 and stem != "conftest.py"}


@pytest.mark.parametrize(
    ("path", "text"),
    [("tests/a/checks.py", "def test_a(): ..."), ("tests/a/test_b.py", "def check_a(): ...")],
)
def test_a_stray_test_is_seen(path, text):
    assert stray_tests(path, text)


def test_no_private_path_is_mentioned():
    wrong = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if SKIPPED & set(parts) or path.suffix not in TEXTS or not path.is_file():
            continue
        if path.stat().st_size < 1 << 20 and not any(part.endswith("_cache") for part in parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            wrong += [f"{path}: {found[0]}" for found in PRIVATE.finditer(text)]
    assert not wrong
    assert PRIVATE.search("see /work" + "/shared/design")
