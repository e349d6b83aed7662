"""The page in a browser, before a real server: what a reader types, sees and can reach with the keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing

import pytest
from chromium import PROGRAM, Chromium
from server_process import Served
from tiny_llama import make_checkpoint

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")

FLAGS = ["--served-model-name", "tiny", "--api-key", "k", "--override-generation-config", '{"temperature": 0}']  # fmt: skip
MESSAGE = "Hi <img src=x onerror=\"document.title='hit'\"><b>you</b>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(make_checkpoint(tmp_path_factory.mktemp("model")), *FLAGS) as found:
        found.client.headers["Authorization"] = "Bearer k"
        yield found


@pytest.fixture(scope="module")
def browser(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    folder = tmp_path_factory.mktemp("browser")
    try:
        found = Chromium(folder).__enter__()
    except (OSError, RuntimeError, TimeoutError) as error:  # no shared memory, a sandbox, ...
        log = (folder / "chromium.log").read_text(errors="replace")
        pytest.skip(f"Chromium does not start here: {error}; {log[-500:]}")
    with closing(found):
        found.sized(1300, 850)
        found.open(server.url + "/")
        yield found


def text(browser: Chromium, id: str) -> str:
    return str(browser.js(f"document.getElementById('{id}').textContent"))


def test_the_key_is_asked_for_and_used(browser: Chromium):
    browser.until("document.getElementById('key-dialog').open")
    assert text(browser, "status") == "needs a key"
    browser.type("wrong")
    browser.enter()
    browser.until("document.getElementById('key-why').textContent.includes('does not know')")
    browser.js("document.getElementById('key').select()")
    browser.type("k")
    browser.enter()
    browser.until("document.getElementById('status').textContent === 'live'")
    assert text(browser, "model") == "tiny"
    assert not browser.js("document.getElementById('key-dialog').open")


def test_a_message_is_answered_as_it_comes_and_the_blocks_change(browser: Chromium, server: Served):
    browser.until("document.getElementById('n-free').textContent.match(/\\d/)")
    before = browser.js("document.getElementById('blocks').toDataURL()")
    assert text(browser, "n-cached") == "cached 0"
    browser.js("""
        window.lengths = new Set();
        new MutationObserver(() => {
            for (const box of document.querySelectorAll(".assistant .text")) lengths.add(box.textContent.length);
        }).observe(document.getElementById("talk"), {childList: true, subtree: true, characterData: true});
        document.getElementById("most").value = "150";
        document.getElementById("words").focus();
        0
    """)
    browser.type(MESSAGE)
    browser.enter()
    browser.until("document.querySelector('.assistant .note')?.textContent.includes('tokens')")
    asked = {"messages": [{"role": "user", "content": MESSAGE}], "max_tokens": 150}
    expected = server.post("/v1/chat/completions", **asked)["choices"][0]["message"]["content"]
    assert browser.js("document.querySelector('.assistant .text').textContent") == expected
    assert browser.js("lengths.size") > 2  # it grew
    browser.until("/cached [1-9]/.test(document.getElementById('n-cached').textContent)")
    assert browser.js("document.getElementById('blocks').toDataURL()") != before
    assert text(browser, "step-note").startswith("step ")
    browser.until("document.querySelector('#lives [data-state=ended] .state')?.textContent === 'done'")  # fmt: skip


def test_what_is_said_is_text_and_nothing_else(browser: Chromium):
    assert browser.js("document.querySelector('.user .text').textContent") == MESSAGE
    assert browser.js("document.querySelectorAll('#talk img, #talk b, #lives img').length") == 0
    assert browser.js("document.title") == "Quire"


def test_words_are_hidden_until_asked_for(browser: Chromium):
    assert MESSAGE not in browser.js("document.getElementById('engine').textContent")
    assert not any("/ui/words" in url for url in browser.asked())
    browser.js("document.querySelector('#lives li:last-child .life').focus()")
    browser.enter()
    browser.until("!document.querySelector('#lives li:last-child .more').hidden")
    browser.tab()
    browser.enter()  # the button that shows them
    browser.until("document.querySelector('#lives pre')?.textContent.includes('<b>you</b>')")
    assert browser.js("document.querySelectorAll('#lives img, #lives b').length") == 0


def test_it_stops_when_told_to(browser: Chromium):
    browser.js("document.getElementById('most').value = ''; document.getElementById('fresh').click()")  # fmt: skip
    browser.until("document.activeElement.id === 'words'")
    browser.type("Go on")
    browser.enter()
    browser.until("document.querySelector('.assistant .text')?.textContent.length > 0")
    browser.press("Escape", 27)
    note = browser.until("document.querySelector('.assistant .note').textContent")
    assert note == "stopped" or "tokens" in note  # it may have been at its end
    browser.until("document.getElementById('send').textContent === 'Send'")


def ground(browser: Chromium) -> float:
    """How bright what everything stands on is, 0 to 255."""
    colour = browser.js("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


def test_it_fits_a_narrow_screen_and_the_dark(browser: Chromium):
    browser.sized(360, 700)
    browser.dark(True)
    for tab in ("chat", "engine"):
        browser.js(f"document.querySelector('[data-to={tab}]').focus()")
        browser.enter()
        browser.until(f"document.getElementById('{tab}').offsetParent !== null")
        assert browser.js("document.documentElement.scrollWidth") <= 360
        assert browser.js("[...document.querySelectorAll('section')].every(one => one.scrollWidth <= 360)")  # fmt: skip
        assert ground(browser) < 60
    browser.dark(False)
    assert ground(browser) > 200
    browser.js("document.getElementById('theme').click(); document.getElementById('theme').click()")
    assert ground(browser) < 60  # auto, light, dark: the reader has the last word
    browser.sized(1300, 850)


STREAM = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning": "hm, <i>so</i>"}}]},
    {
        "choices": [
            {
                "delta": {
                    "content": "See <script>document.title='hit'</script>é:\n```html\n<img src=x onerror=hit()>"
                }
            }
        ]
    },
    {"choices": [{"delta": {"content": "\n```\ndone"}, "finish_reason": "length"}]},
    {"choices": [], "usage": {"completion_tokens": 9}},
]


def test_a_stream_is_read_however_it_is_cut_and_never_as_markup(browser: Chromium):
    """Scripted: the frames come a byte at a time."""
    text = "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in STREAM)
    frames = ": keep-alive\n\n" + text + "data: [DONE]\n\n"
    browser.js(f"""
        window.ours = fetch;
        window.fetch = (path, options) => {{
            if (!path.startsWith("v1/chat")) return ours(path, options);
            const bytes = new TextEncoder().encode({json.dumps(frames)});
            return Promise.resolve(new Response(new ReadableStream({{start(to) {{
                for (const byte of bytes) to.enqueue(new Uint8Array([byte]));
                to.close();
            }}}})));
        }};
        document.getElementById("fresh").click();
        0
    """)
    browser.type("Show me")
    browser.enter()
    note = browser.until("document.querySelector('.assistant .note')?.textContent")
    assert note.startswith("9 tokens")
    assert note.endswith("cut at the most tokens")
    box = "document.querySelector('.assistant .text')"
    assert browser.js(f"{box}.firstChild.textContent") == "See <script>document.title='hit'</script>é:\n"  # fmt: skip
    assert browser.js(f"{box}.querySelector('pre').textContent") == "<img src=x onerror=hit()>"
    assert browser.js(f"{box}.lastChild.textContent") == "done"
    assert browser.js("document.querySelector('.thoughts div').textContent") == "hm, <i>so</i>"
    assert browser.js("document.querySelectorAll('#talk script, #talk img, #talk i').length") == 0
    assert browser.js("document.title") == "Quire"
    browser.js("window.fetch = ours; 0")


def test_nothing_went_wrong_and_nothing_was_fetched_from_elsewhere(
    browser: Chromium, server: Served
):
    refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
    assert set(browser.complaints()) <= {refused}
    assert browser.asked()
    assert all(url.startswith((server.url, "data:")) for url in browser.asked())
