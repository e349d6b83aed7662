"""Pages are correct: links lead to something, the index is complete, commands exist."""

from __future__ import annotations

import re

import pytest
from source_rules import ROOT, source_files

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def dead_links(page, text: str) -> list[str]:
    """Relative links to missing files, and to headings that this page does not have."""
    anchors = {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-")
        for h in re.findall(r"^#+ (.*)", text, re.M)
    }
    wrong = []
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        if (target and not (page.parent / target).exists()) or (
            not target and anchor not in anchors
        ):
            wrong.append(f"{page.name}: {link}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert not dead_links(page, page.read_text(encoding="utf-8"))


def test_a_dead_link_is_seen():
    page = ROOT / "README.md"
    assert dead_links(page, "# A b\n[x](#a-b) [y](docs/index.md)") == []
    assert dead_links(page, "[x](nowhere.md) [y](#nothing)") == [
        "README.md: nowhere.md",
        "README.md: #nothing",
    ]


FILE = re.compile(r"`((?:\w+/)*(\w+\.(?:py|cpp|h)))[`:(]")
MADE_UP = {"utils.py", "program.py", "your_program.py", "test_SOMETHING_attack.py", "own.py"}
"""Names that pages use for the reader's files."""


def absent_files(name: str, text: str, here: set[str]) -> list[str]:
    """Source files that a text names in backticks and that no folder has."""
    return [f"{name}: {m[1]}" for m in FILE.finditer(text) if m[2] not in here | MADE_UP]


def test_files_that_pages_and_docstrings_name_exist():
    places = ("src", "tests", "benchmarks", "tools", "compat")
    here = {p.name for place in places for p in (ROOT / place).rglob("*.*")} | {"setup.py"}
    texts = [(page.name, page.read_text(encoding="utf-8")) for page in PAGES]
    texts += [(file.path, file.text) for file in source_files()]
    assert [line for name, text in texts for line in absent_files(name, text, here)] == []
    assert absent_files("a.md", "see `b/c.py`, `d.py`", {"d.py"}) == ["a.md: b/c.py"]


INDEXES = ("index.md", "design/index.md", "design/decisions.md")
"""Users read the first; it leads to the second, and that one to the third."""


def test_the_indexes_list_every_page():
    docs, listed = ROOT / "docs", set()
    for name in INDEXES:
        here = docs / name
        for link in LINK.findall(here.read_text(encoding="utf-8")):
            listed.add((here.parent / link).resolve())
    assert set(docs.glob("**/*.md")) - listed - {docs / "index.md"} == set()


def test_the_users_index_has_no_decisions():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "decisions/" not in text


def test_commands_that_pages_name_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named = set(re.findall(r"`make ([a-z-]+)", text)) | set(
            re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
        )
        assert named
        assert named <= targets, page


def test_ci_runs_the_command_of_the_readme():
    assert "```sh\nmake test\n```" in (ROOT / "README.md").read_text(encoding="utf-8")
    script = ROOT / ".ci" / "run"
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "exec make test"
    assert script.stat().st_mode & 0o111


def test_the_picture_has_a_line_for_every_package():
    text = (ROOT / "docs" / "design" / "picture.md").read_text(encoding="utf-8")
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", " ".join(table)))
    here = {file.package for file in source_files()} - {""}
    assert here - named == set()
    assert named - here <= {"embedded"}  # contains no code


def test_decisions_are_numbered_and_have_their_four_parts():
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [page.name[:5] for page in pages]
    assert len(set(numbers)) == len(pages), "two decisions have one number"
    for page in pages:
        number, text = int(page.name[:4]), page.read_text(encoding="utf-8")
        assert text.startswith(f"# {number}. "), page.name
        said = re.findall(
            r"^\*\*(We will|Because|Instead of|This would change our mind)", text, re.M
        )
        assert said == ["We will", "Because", "Instead of", "This would change our mind"], page.name
        assert text.count("\n") <= 60, page.name


def test_the_readme_names_the_routes_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("| HTTP |"))
    named = set(re.findall(r"`(/[^`]+)`", line.split("|")[2]))
    app = (ROOT / "src" / "quire" / "server" / "app.py").read_text(encoding="utf-8")
    here = set(re.findall(r'"(?:GET|POST)[^"]*", "([^"]+)"', app))
    assert named <= here
    assert {path for path in here if re.fullmatch(r"/v1/\w+(/completions)?", path)} <= named
