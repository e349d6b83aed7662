"""The site of docs/ builds without a warning, has every page, finds words, and loads nothing from other sites."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="the site of docs/ needs mkdocs-material")
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from tools import docs_site

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module", autouse=True)
def no_advertisement() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    assert config.strict
    config.plugins.on_startup(command="build", dirty=False)
    build(config)  # strict: a warning, such as for a dead link or anchor, is an Abort
    return folder


class LoadedResources(HTMLParser):
    """Addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.found.append(str(given["src"]))
        if tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "icon", "preload"):
            self.found.append(str(given["href"]))


def test_every_page_is_there_and_loads_nothing_from_other_sites(site: Path):
    for page in DOCS.rglob("*.md"):
        html = site / page.relative_to(DOCS).with_suffix(".html")
        parser = LoadedResources()
        parser.feed(html.read_text(encoding="utf-8"))
        assert parser.found, "styles and scripts of the site itself"
        for address in parser.found:
            assert "://" not in address, f"{page.name}: {address}"
            assert not address.startswith("//"), f"{page.name}: {address}"
            assert (html.parent / re.split(r"[?#]", address)[0]).exists(), f"{page.name}: {address}"


def test_the_search_knows_every_page(site: Path):
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    places = {one["location"].partition("#")[0] for one in index}
    assert {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")} <= places  # fmt: skip
    assert any("num_speculative_tokens" in one["text"] and "speculative" in one["location"] for one in index)  # fmt: skip


def test_tables_and_blocks_of_code_are_drawn_as_such(site: Path):
    """A list or table that Markdown takes for a paragraph, or a fence that stays text."""
    for page in sorted(DOCS.glob("*.md")):
        html = (site / f"{page.stem}.html").read_text(encoding="utf-8")
        text = re.sub(r"<(pre|code)[^>]*>.*?</\1>", "", html, flags=re.S)
        assert "```" not in text, page.name
        assert not re.search(r"<p>[^<]*\n- ", text), (
            f"{page.name}: a list needs an empty line before it"
        )
        assert not re.search(r"\|---\|", text), page.name


def test_the_menu_follows_the_indexes():
    menu = docs_site.menu()
    assert menu[0] == {"Quire": "index.md"}
    sections = [next(iter(one)) for one in menu]
    assert sections[1] == "Start"
    assert sections[-1] == "Developers"
    whole = json.dumps(menu)
    for page in DOCS.rglob("*.md"):
        assert whole.count(f'"{page.relative_to(DOCS).as_posix()}"') == 1, page.name


def test_links_out_of_the_folder_lead_to_pages_of_the_site(site: Path):
    page = DOCS / "quantization.md"
    found = docs_site.rewritten(page, "[a](../src/quire/models/gguf/architectures.toml) [b](vllm.md#x) [c](https://a.b)", lambda uri: True)  # fmt: skip
    assert found == "[a](source/src/quire/models/gguf/architectures.toml.md) [b](vllm.md#x) [c](https://a.b)"  # fmt: skip
    absent = docs_site.rewritten(ROOT / "README.md", "[a](LICENSE)", lambda uri: False)
    assert absent == "[a](#)"
    assert (site / "source/src/quire/models/gguf/architectures.toml.html").exists()


@pytest.mark.parametrize("text", ["[a](nowhere.md)", "[a](#nothing)", "[a](b.md#nothing)"])
def test_a_dead_link_ends_the_build(text: str, tmp_path: Path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "index.md").write_text(f"# A\n\n{text}\n")
    (folder / "b.md").write_text("# B\n")
    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(folder), site_dir=str(tmp_path / "site"), hooks=[], plugins=[])  # fmt: skip
    with pytest.raises(Abort):
        build(config)
