"""The page's Markdown, in a browser: what becomes an element, and that nothing else does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from chromium import PROGRAM, Chromium

from quire.server.page.document import WEB

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")


def code(text: str, language: str = "") -> str:
    return f'<div><div><span>{language}</span><button type="button" aria-label="Copy the code">Copy</button></div><pre>{text}</pre></div>'


def link(url: str) -> str:
    return f'<a href="{url}" target="_blank" rel="noopener noreferrer nofollow">{url}</a>'


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
    "```py\na = '<b>' # c\n```\nend": code("a = <span>'&lt;b&gt;'</span> <span># c</span>", "py")
    + "<p>end</p>",
    "```<b>\nreturn 1\n```": code("return 1", "&lt;b&gt;"),
    "```\nnot *closed": code("not *closed"),
    "- [ ] a\n- [x] b": '<ul><li><input type="checkbox" disabled="" aria-label="open">a</li><li><input type="checkbox" disabled="" checked="" aria-label="done">b</li></ul>',
    "see https://x.y/z(1). Or https://x.y).": f"<p>see {link('https://x.y/z(1)')}. Or {link('https://x.y')}).</p>",
    "$5 and $10, javascript:alert(1)": "<p>$5 and $10, javascript:alert(1)</p>",
    "$x^2$": "<p><math><msup><mi>x</mi><mn>2</mn></msup></math></p>",
    "$$\n\\frac{a}{b}\n$$": '<p><math display="block"><mfrac><mi>a</mi><mi>b</mi></mfrac></math></p>',
    "\\(\\alpha \\leq \\sqrt{2}\\)": "<p><math><mrow><mi>α</mi><mo>≤</mo><msqrt><mn>2</mn></msqrt></mrow></math></p>",
    "$\\text{<b>x</b>}$": "<p><math><mtext>&lt;b&gt;x&lt;/b&gt;</mtext></math></p>",
    "$\\unknown{a}$": "<p><math><mrow><mtext>\\unknown</mtext><mi>a</mi></mrow></math></p>",
    "$\\sum_{i=1}^n i$": "<p><math><mrow><munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><mi>i</mi></mrow></math></p>",
    "$\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}$": "<p><math><mrow><mo>(</mo><mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr><mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr></mtable><mo>)</mo></mrow></math></p>",
    "| a | b |\n|---|--:|\n| 1 | 2 |": '<div><table><tr><th>a</th><th style="text-align: right;">b</th></tr><tr><td>1</td><td style="text-align: right;">2</td></tr></table></div>',
    "---": "<hr>",
    "[l](https://x.y/z)": '<p><a href="https://x.y/z" target="_blank" rel="noopener noreferrer nofollow">l</a></p>',
    "[l](javascript:alert(1)) ![i](data:x)": "<p>[l](javascript:alert(1)) ![i](data:x)</p>",
    "![pic](http://a/b.png)": '<p><a href="http://a/b.png" target="_blank" rel="noopener noreferrer nofollow">pic</a></p>',
}
HOSTILE = ["**a " * 25_000, "[" * 90_000, "`" * 90_000, "> " * 40_000, "- " * 40_000, "_a " * 30_000, "\\" * 90_000,
           "$a" * 45_000, "\\(" * 45_000, "\\[\n" * 30_000, "$$\n" * 30_000, "https://" * 10_000, "- [ ] " * 15_000,
           "$" + "{" * 400 + "$ " * 200, "```js\n" + "/*" * 40_000, "```py\n" + '"""' * 30_000, "```c\n" + "0x" * 40_000,
           "$\\left(" * 12_000, "$$" + "\\frac" * 300 + "$$", "|" * 50_000 + "\n" + "|-" * 25_000, "- a\n" * 20_000, ("> " * 30 + "x\n") * 3_000]  # fmt: skip


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *about: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    folder = tmp_path_factory.mktemp("browser")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(WEB)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        browser = Chromium(folder).__enter__()
    except (OSError, RuntimeError, TimeoutError) as error:
        server.shutdown()
        pytest.skip(f"Chromium does not start here: {error}")
    try:
        browser.open(
            f"http://127.0.0.1:{server.server_port}/markdown.js"
        )  # a page of the same origin
        browser.js("""
            import("/markdown.js").then(({render}) => {
                window.html = text => {
                    const box = document.createElement("div");
                    render(box, text);
                    return box.innerHTML.replaceAll(/ (class|tabindex|stretchy)="[^"]*"/g, "");
                };
            })
        """)
        yield browser
    finally:
        browser.close()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("text", CASES)
def test_a_text_becomes_these_elements(browser: Chromium, text: str):
    assert browser.js(f"html({json.dumps(text)})") == CASES[text]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_text_renders_quickly(browser: Chromium, text: str):
    """Twice the text takes at most some three times as long: the time does not grow with its square."""
    measure = "(() => {{ const t = performance.now(); html({}); return performance.now() - t; }})()"
    half = min(browser.js(measure.format(json.dumps(text[: len(text) // 2]))) for _ in range(2))
    whole = min(browser.js(measure.format(json.dumps(text))) for _ in range(2))
    assert whole < 3.5 * half + 200
