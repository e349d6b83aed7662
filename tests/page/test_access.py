"""The page for every reader: three widths and more, light and dark, fingers, the keyboard alone, screen readers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PROGRAM, Chromium
from reader import ask, content, scripted
from server_process import Served

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")

AXE = Path(__file__).parents[2] / ".cache/axe/node_modules/axe-core/axe.min.js"
WIDTHS = (320, 390, 820, 1400, 1900, 2560)
ANSWER = "# A\n\n- [x] b\n\n```py\nprint(1)  # c\n```\n\n| a | b |\n|---|---|\n| 1 | $x^2$ |\n\nhttps://x.y"


@pytest.fixture(scope="module")
def page(browser: Chromium, server: Served) -> Iterator[Chromium]:
    """The page with an answer in it."""
    browser.js("sessionStorage.setItem('key', 'k'); 0")
    browser.open(server.url + "/")
    browser.until("document.getElementById('status').textContent === 'live'")
    with scripted(browser, {"choices": [{"delta": {"reasoning": "hm"}}]}, content(ANSWER)):
        ask(browser, "Show **me**")
    yield browser
    browser.sized(1300, 850)
    browser.dark(False)


def show(page: Chromium, width: int, tab: str) -> None:
    page.sized(width, 844)
    page.js(f"document.querySelector('[data-to={tab}]').click(); 0")
    page.until(f"document.getElementById('{tab}').offsetParent !== null")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_screen(page: Chromium, width: int, dark: bool):
    page.dark(dark)
    for tab in ("chat", "engine"):
        show(page, width, tab)
        assert page.js("document.documentElement.scrollWidth") <= width
        assert page.js("[...document.querySelectorAll('section')].every(one => one.scrollWidth <= one.clientWidth + 1)")  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_the_empty_page_fits(page: Chromium, width: int):
    show(page, width, "chat")
    page.js("document.getElementById('fresh').click(); 0")
    assert page.js("document.getElementById('welcome').offsetParent !== null")
    assert page.js(
        "document.getElementById('talk').scrollWidth <= document.getElementById('talk').clientWidth"
    )
    assert page.js("document.getElementById('copy-curl').getBoundingClientRect().right") <= width
    with scripted(page, {"choices": [{"delta": {"reasoning": "hm"}}]}, content(ANSWER)):
        ask(page, "Show **me**")
    assert page.js(
        "document.getElementById('talk').scrollWidth <= document.getElementById('talk').clientWidth"
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tiles_have_no_holes(page: Chromium, width: int):
    show(page, width, "engine")
    ends = page.js("""(() => {
        const rows = new Map();
        for (const tile of document.querySelectorAll(".tile:not([hidden])")) {
            const {top, right} = tile.getBoundingClientRect();
            rows.set(top, Math.max(rows.get(top) ?? 0, right));
        }
        const edge = document.getElementById("tiles").getBoundingClientRect().right;
        return [...rows.values()].map(right => edge - right);
    })()""")
    assert ends
    assert all(abs(gap) < 1.5 for gap in ends)


@pytest.mark.parametrize("width", [320, 390])
def test_fingers_reach_every_button(page: Chromium, width: int):
    for tab in ("chat", "engine"):
        show(page, width, tab)
        small = page.js("""
            [...document.querySelectorAll("button, select, summary, #words")].filter(one => one.offsetParent && one.checkVisibility())
                .map(one => [one.id || one.textContent || one.className, one.getBoundingClientRect()])
                .filter(([, box]) => box.height < 43.5 || box.width < 43.5).map(([name, box]) => `${name} ${box.width} x ${box.height}`)
        """)
        assert small == []


def test_a_phone_has_no_shift_key(page: Chromium, server: Served):
    page.send("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
    try:
        page.open(server.url + "/")
        page.until("!document.getElementById('send').disabled")
        assert page.js("document.getElementById('words').placeholder") == "Message"
        page.js(
            "document.querySelector('[data-to=chat]').click(); document.getElementById('words').focus()"
        )
        page.type("a")
        page.enter()
        assert page.js("document.getElementById('words').value") == "a\n"
    finally:
        page.send("Emulation.setTouchEmulationEnabled", enabled=False)
        page.js("document.getElementById('words').value = ''; 0")
        page.open(server.url + "/")
        page.until("!document.getElementById('send').disabled")


def test_the_keyboard_alone_reaches_everything(page: Chromium):
    """Tab visits each button of the page, and the drawers open, close and give the focus back."""
    page.sized(1400, 900)
    page.js("document.activeElement.blur(); 0")
    visited = set[str]()
    for _ in range(60):
        page.tab()
        visited.add(page.js("document.activeElement.id || document.activeElement.textContent"))
    wanted = {"history-open", "served", "theme", "words", "send", "fresh", "options-open", "hold", "Copy", "Edit", "Regenerate"}  # fmt: skip
    assert wanted <= visited
    for opener, drawer in [("history-open", "history"), ("options-open", "options")]:
        page.js(f"document.getElementById('{opener}').focus()")
        page.enter()
        page.until(f"document.getElementById('{drawer}').open")
        assert page.js(f"document.getElementById('{drawer}').contains(document.activeElement)")
        page.press("Escape", 27)
        page.until(f"!document.getElementById('{drawer}').open")
        assert page.js("document.activeElement.id") == opener


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not here: npm install --prefix .cache/axe axe-core")  # fmt: skip
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(page: Chromium, width: int, dark: bool):
    page.dark(dark)
    page.js("document.activeElement.blur(); 0")
    if not page.js("typeof axe === 'object'"):
        page.js(AXE.read_text(encoding="utf-8") + "; 0")
    for tab, dialog in [("chat", None), ("engine", None), ("chat", "history"), ("chat", "options")]:
        show(page, width, tab)
        if dialog:
            page.js(f"document.getElementById('{dialog}-open').click(); 0")
        serious = page.js("""
            axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations
                .filter(one => ["serious", "critical"].includes(one.impact))
                .map(one => `${one.id}: ${one.nodes.slice(0, 4).map(node => node.target + " " + (node.any[0]?.message ?? "")).join(", ")}`))
        """)
        if dialog:
            page.js(f"document.getElementById('{dialog}').close(); 0")
        assert serious == [], (tab, dialog)
