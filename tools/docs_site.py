"""Hooks of mkdocs for the site of docs/: the menu, and pages for files outside docs/ to which pages link.

The menu follows the indexes: the headings and links of docs/index.md, docs/design/index.md and docs/design/decisions.md.
A linked file outside docs/ becomes the page `source/PATH`: Markdown as it is, other text as one block of code, a folder as a list.
Knows Markdown links and mkdocs. Does not know what a page says.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")
HEADING = re.compile(r"^## (.+)$", re.M)
ENTRY = re.compile(r"^(?:-|\d+\.) \[([^\]]+)\]\(([^)\s]+)\)", re.M)
OUTSIDE = "source/"
PICTURE = re.compile(
    r'<picture><source media="[^"]*dark[^"]*" srcset="([^"]+)"><img alt="([^"]*)" src="([^"]+)"></picture>'
)
"""A drawing for dark and light pages. The site's own switch decides, not the system's."""
Nav = list[dict[str, Any]]


def entries(index: str) -> list[tuple[str, str]]:
    """(title, path below docs/) of each list entry of an index."""
    page = DOCS / index
    found = ENTRY.findall(page.read_text(encoding="utf-8"))
    return [(title.replace("`", ""), below(page, link)) for title, link in found]


def below(page: Path, link: str) -> str:
    """Path below docs/ of a link of a page."""
    return Path(os.path.normpath(page.parent / link)).relative_to(DOCS).as_posix()


def menu() -> Nav:
    """The menu: a section for each heading of the users' index, and the developers' pages last."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    titles, nav, seen = HEADING.findall(text), [{"Quire": "index.md"}], {"index.md"}
    for title, part in zip(titles, HEADING.split(text)[2::2], strict=True):
        pages: Nav = []
        for name, link in ENTRY.findall(part):
            path = below(DOCS / "index.md", link)
            if path not in seen:
                pages.append({name: path})
                seen.add(path)
        if title == "Developers":
            pages += [{name: path} for name, path in entries("design/index.md")]
            pages += [{"Why": [{name: path} for name, path in entries("design/decisions.md")]}]
        nav.append({title: pages})
    return nav


def linked(page: Path, text: str) -> list[Path]:
    """Files and folders of the repository, outside docs/, to which a page links."""
    found = []
    for _, link, _ in LINK.findall(text):
        target = Path(os.path.normpath(page.parent / link))
        if link and "://" not in link and not target.is_relative_to(DOCS) and target.exists():
            found.append(target)
    return found


def shown(path: Path) -> str:
    """The Markdown of a page for a file or folder outside docs/."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        here = sorted(one for one in path.rglob("*") if one.is_file() and "__pycache__" not in one.parts)  # fmt: skip
        lines = "\n".join(f"- `{one.relative_to(ROOT).as_posix()}`" for one in here)
        return f"# {name}\n\nIn the repository:\n\n{lines}\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {name}\n\n````{path.suffix[1:]}\n{text}\n````\n"


def uri_of(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{OUTSIDE}{name}" if path.suffix == ".md" else f"{OUTSIDE}{name}.md"


def rewritten(page: Path, text: str, known: Callable[[str], bool]) -> str:
    """A page's text, with each link to a file outside docs/ replaced by one to its page; links to absent pages become text."""
    here = posixpath.dirname(uri_of(page))

    def replace(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        target = Path(os.path.normpath(page.parent / link))
        if not link or "://" in link or not target.is_relative_to(ROOT):
            return found[0]
        if page.is_relative_to(DOCS) and target.is_relative_to(DOCS):
            return found[0]
        uri = uri_of(target)
        return f"{before}{posixpath.relpath(uri, here)}{after}" if known(uri) else f"{before}#)"

    return LINK.sub(replace, text)


def on_config(config: Any) -> Any:
    config["nav"] = menu()
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    waiting = [(path, path.read_text(encoding="utf-8")) for path in DOCS.rglob("*.md")]
    made: set[Path] = set()
    for page, text in waiting:  # grows: pages outside docs/ link further
        for target in linked(page, text):
            if target in made:
                continue
            made.add(target)
            content = shown(target)
            files.append(File.generated(config, uri_of(target), content=content, inclusion=InclusionLevel.NOT_IN_NAV))  # fmt: skip
            if target.suffix == ".md":
                waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    path = DOCS / uri
    if uri.startswith(OUTSIDE):
        name = uri.removeprefix(OUTSIDE)
        path = ROOT / name if (ROOT / name).is_file() else ROOT / name.removesuffix(".md")
        if path.suffix != ".md":
            return markdown
    markdown = PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", markdown)
    return rewritten(path, markdown, lambda uri: files.get_file_from_path(uri) is not None)
