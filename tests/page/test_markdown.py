"""The page's Markdown, in a browser: what becomes an element, and that nothing else does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PROGRAM, Chromium

import quire.server.page

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")

SOURCE = (Path(quire.server.page.__file__).parent / "markdown.js").read_text()
MAKE = """
    const make = (name, className = "", text = "") =>
        Object.assign(document.createElement(name), {className, textContent: text});
"""
CASES = {
    "plain <b>text</b>": "<p>plain &lt;b&gt;text&lt;/b&gt;</p>",
    "two\nlines\n\nnext": "<p>two\nlines</p><p>next</p>",
    "# One\n### Three": "<h3>One</h3><h5>Three</h5>",
    "**b** __b__ *i* _i_ ~~d~~": "<p><strong>b</strong> <strong>b</strong> <em>i</em> <em>i</em> <del>d</del></p>",
    "a_b_c 2*3*4 **un a * b": "<p>a_b_c 2*3*4 **un a * b</p>",
    "`a <b>` ``c`d`` \\*e\\*": "<p><code>a &lt;b&gt;</code> <code>c`d</code> *e*</p>",
    "- a\n- b\n  1. c\n  2. d\n\n- e": "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li><li>e</li></ul>",
    "4. x\n5. y": '<ol start="4"><li>x</li><li>y</li></ol>',
    "- a\n\n  more": "<ul><li>a<p>more</p></li></ul>",
    "> q\n> - r": "<blockquote><p>q</p><ul><li>r</li></ul></blockquote>",
    "```py\na = '<b>'\n```\nend": "<pre>a = '&lt;b&gt;'</pre><p>end</p>",
    "```\nnot *closed": "<pre>not *closed</pre>",
    "| a | b |\n|---|--:|\n| 1 | 2 |": '<div><table><tr><th>a</th><th style="text-align: right;">b</th></tr><tr><td>1</td><td style="text-align: right;">2</td></tr></table></div>',
    "---": "<hr>",
    "[l](https://x.y/z)": '<p><a href="https://x.y/z" target="_blank" rel="noopener noreferrer nofollow">l</a></p>',
    "[l](javascript:alert(1)) ![i](data:x)": "<p>[l](javascript:alert(1)) ![i](data:x)</p>",
    "![pic](http://a/b.png)": '<p><a href="http://a/b.png" target="_blank" rel="noopener noreferrer nofollow">pic</a></p>',
}
HOSTILE = ["**a " * 25_000, "[" * 90_000, "`" * 90_000, "> " * 40_000, "- " * 40_000, "_a " * 30_000, "\\" * 90_000,
           "|" * 50_000 + "\n" + "|-" * 25_000, "- a\n" * 20_000, ("> " * 30 + "x\n") * 3_000]  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    folder = tmp_path_factory.mktemp("browser")
    try:
        found = Chromium(folder).__enter__()
    except (OSError, RuntimeError, TimeoutError) as error:
        pytest.skip(f"Chromium does not start here: {error}")
    try:
        found.js(f"""
            window.html = (() => {{ {MAKE} {SOURCE} return text => {{
                const box = document.createElement("div");
                render(box, text);
                return box.innerHTML.replaceAll(' class=""', "").replaceAll(' class="scroll"', "");
            }}; }})(); 0
        """)
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("text", CASES)
def test_a_text_becomes_these_elements(browser: Chromium, text: str):
    assert browser.js(f"html({json.dumps(text)})") == CASES[text]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_text_renders_quickly(browser: Chromium, text: str):
    """Twice the text takes at most some three times as long: the time does not grow with its square."""
    measure = "(() => {{ const t = performance.now(); html({}); return performance.now() - t; }})()"
    half = min(browser.js(measure.format(json.dumps(text[: len(text) // 2]))) for _ in range(2))
    whole = min(browser.js(measure.format(json.dumps(text))) for _ in range(2))
    assert whole < 3.5 * half + 200
