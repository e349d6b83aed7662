"""The page in a browser, before a real server: what a reader types, sees and can reach with the keyboard."""

from __future__ import annotations

import re

import pytest
from chromium import PROGRAM, Chromium
from reader import ask, click, content, scripted, text
from server_process import Served
from tiny_llama import make_checkpoint

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")

MESSAGE = "Hi <img src=x onerror=\"document.title='hit'\"><b>you</b>"


def test_the_page_asks_for_the_key_and_uses_it(browser: Chromium):
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


def test_answers_stream_and_the_block_view_updates(browser: Chromium, server: Served):
    browser.until("document.getElementById('n-free').textContent.match(/\\d/)")
    before = browser.js("document.getElementById('blocks').toDataURL()")
    assert text(browser, "n-cached") == "cached 0"
    browser.js("""
        window.lengths = new Set();
        new MutationObserver(() => {
            for (const box of document.querySelectorAll(".assistant .text")) lengths.add(box.textContent.length);
        }).observe(document.getElementById("talk"), {childList: true, subtree: true, characterData: true});
        document.getElementById("option-max_tokens").value = "1000";
        Object.defineProperty(navigator, "clipboard", {configurable: true, value: {writeText: async text => { window.copied = text; }}});
        document.getElementById("words").focus();
        0
    """)
    browser.type(MESSAGE)
    browser.enter()
    browser.until(
        "document.querySelector('.assistant .note')?.textContent.includes('tokens') && !document.querySelector('.busy')"
    )
    asked = {"messages": [{"role": "user", "content": MESSAGE}], "max_tokens": 1000}
    expected = server.post("/v1/chat/completions", **asked)["choices"][0]["message"]["content"]
    click(browser, ".assistant", "Copy")
    assert browser.until("window.copied") == expected
    assert browser.js("lengths.size") > 2  # it grew
    browser.until("/cached [1-9]/.test(document.getElementById('n-cached').textContent)")
    assert browser.js("document.getElementById('blocks').toDataURL()") != before
    assert text(browser, "step-note").startswith("step ")
    browser.until("document.querySelector('#lives [data-state=ended] .state')?.textContent === 'done'")  # fmt: skip


def test_a_model_or_adapter_is_chosen_by_its_name(browser: Chromium):
    """The list has every name of /v1/models; the first one is chosen."""
    served = "document.getElementById('served')"
    browser.until(f"!document.getElementById('models').hidden && {served}.options.length === 2")
    assert browser.js(f"[...{served}.options].map(one => one.value)") == ["tiny", "other"]
    assert browser.js(f"{served}.value") == "tiny"
    assert browser.js("document.querySelector('.assistant .by').textContent") == "tiny"


def test_messages_are_shown_as_text_only(browser: Chromium):
    assert browser.js("document.querySelector('.user .text').textContent") == MESSAGE
    assert browser.js("document.querySelectorAll('#turns img, #turns b, #lives img').length") == 0
    assert browser.js("document.title") == "Quire"


def test_token_texts_are_hidden_by_default(browser: Chromium):
    assert MESSAGE not in browser.js("document.getElementById('engine').textContent")
    assert not any("/ui/words" in url for url in browser.asked())
    browser.js("document.querySelector('#lives li:last-child .life').focus()")
    browser.enter()
    browser.until("!document.querySelector('#lives li:last-child .more').hidden")
    browser.tab()
    browser.enter()  # the button that shows them
    browser.until("document.querySelector('#lives pre')?.textContent.includes('<b>you</b>')")
    assert browser.js("document.querySelectorAll('#lives img, #lives b').length") == 0


def test_the_stop_button_ends_the_answer(browser: Chromium):
    browser.js("document.getElementById('option-max_tokens').value = ''; document.getElementById('fresh').click()")  # fmt: skip
    browser.until("document.activeElement.id === 'words'")
    browser.type("Go on")
    browser.enter()
    browser.until("document.querySelector('.assistant .text')?.textContent.length > 0")
    browser.press("Escape", 27)
    browser.until("document.getElementById('send').textContent === 'Send'")
    note = browser.js("document.querySelector('.assistant .note').textContent")
    assert note.startswith("stopped") or "tokens" in note  # it may have been at its end


TIERS = """
    import("/ui/page/tiers.js").then(tiers => {
      const counts = {"kv_tier_queries:disk": 10, "kv_tier_hits:disk": 8, "kv_cached_tokens:disk": 128, "kv_load_bytes:disk": 3 << 20,
        "kv_store_bytes:disk": 5 << 20, "kv_tier_bytes:disk": 1 << 30, "kv_tier_limit:disk": 4 * 2 ** 30, "kv_tier_errors:disk": 2,
        "kv_tier_queries:redis": 2, "kv_tier_bytes:redis": 7 << 20, "kv_active_loads": 1, "kv_active_saves": 3};
      tiers.drawTiers({counts, prefix_hits: 160}, {used: 1 << 20, limit: 4 << 20});
      const shown = [...document.querySelectorAll("#tiers li")].map(row => [...row.querySelectorAll("b, .used, .told, .errors")].map(one => one.textContent));
      const life = {prompt: 200, hit: 160, loaded: {disk: 128}}, bar = document.createElement("div");
      tiers.fillSources(bar, life);
      return {shown, note: document.getElementById("tiers-note").textContent, words: tiers.sourceWords(life),
        bar: [...bar.children].map(part => [part.dataset.kind, part.style.flexGrow]), none: tiers.sourceWords({prompt: 9, hit: 0, loaded: {}})};
    })
"""


def test_the_live_view_shows_tiers_and_where_prompts_came_from(browser: Chromium):
    browser.until("!document.getElementById('tiers-panel').hidden")
    names = "[...document.querySelectorAll('#tiers b')].map(one => one.textContent)"
    assert browser.js(names) == ["KV cache", "Disk"]
    browser.until(
        "/[1-9][\\d.]* [KM]iB written/.test(document.getElementById('tiers').textContent)"
    )
    browser.js(
        "document.getElementById('hold').click()"
    )  # the state of the server does not overwrite what follows
    found = browser.js(TIERS)
    assert found["shown"] == [
        ["KV cache", "1.00 MiB of 4.00 MiB", "32 prompt tokens found", ""],
        ["Disk", "1.00 GiB of 4.00 GiB", "128 prompt tokens found · 8 of 10 blocks loaded · 3.00 MiB read · 5.00 MiB written", "2 unreadable"],
        ["Redis", "7.00 MiB", "0 prompt tokens found · 0 of 2 blocks loaded · 0 B read · 0 B written", ""],
    ]  # fmt: skip
    assert found["note"] == "1 request loading, 3 blocks to be written"
    assert found["words"] == "32 from the KV cache, 128 from disk"
    assert found["bar"] == [["device", "32"], ["disk", "128"], ["computed", "40"]]
    assert found["none"] == "none of them cached"
    browser.js("document.getElementById('hold').click()")
    browser.until(f"{names}.length === 2")


def ground(browser: Chromium) -> float:
    """How bright what everything stands on is, 0 to 255."""
    colour = browser.js("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


def test_the_page_fits_narrow_screens_and_dark_mode(browser: Chromium):
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


def test_a_stream_is_parsed_for_any_chunking_and_never_as_markup(browser: Chromium):
    with scripted(browser, *STREAM):
        check_stream(browser)


def check_stream(browser: Chromium) -> None:
    browser.type("Show me")
    browser.enter()
    browser.until("document.querySelector('.assistant .note')?.textContent && !document.querySelector('.busy')")  # fmt: skip
    note = browser.js("document.querySelector('.assistant .note').textContent")
    assert note.startswith("9 tokens")
    assert note.endswith("ended at the maximum number of tokens")
    box = "document.querySelector('.assistant .text')"
    assert browser.js(f"{box}.firstChild.textContent") == "See <script>document.title='hit'</script>é:"  # fmt: skip
    assert browser.js(f"{box}.querySelector('pre').textContent") == "<img src=x onerror=hit()>"
    assert browser.js(f"{box}.lastChild.textContent") == "done"
    assert browser.js("document.querySelector('.thoughts div').textContent") == "hm, <i>so</i>"
    assert browser.js("document.querySelectorAll('#talk script, #talk img, #talk i').length") == 0
    assert browser.js("document.title") == "Quire"


def test_the_server_judges_the_options(browser: Chromium):
    """Any number is sent, with the options closed too; the chat shows why the server refuses one."""
    browser.js("document.getElementById('fresh').click(); document.getElementById('option-max_tokens').value = '2'; 0")  # fmt: skip
    field = "document.getElementById('option-temperature')"
    for given, note in [("0.75", "2 tokens"), ("2.5", "from 0 to 2; it is 2.5"), ("-1", "temperature"), ("0,5", "temperature")]:  # fmt: skip
        browser.js(f"document.getElementById('options-open').click(); {field}.value = ''; {field}.focus()")  # fmt: skip
        browser.type(given)
        browser.press("Escape", 27)
        browser.js("document.getElementById('words').value = ''; 0")
        ask(browser, "Hi")
        assert note in browser.js("[...document.querySelectorAll('.assistant .note')].at(-1).textContent")  # fmt: skip
    browser.js("for (const id of ['option-temperature', 'option-max_tokens', 'words']) document.getElementById(id).value = ''; 0")  # fmt: skip


CALLS = [
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "<b>look</b>", "arguments": ""}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"place": "<img src=x '}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "onerror=hit()>\u202e\"}"}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 4000000000, "function": {"name": "f", "arguments": "[](javascript:hit())"}}]}}]},
    {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"completion_tokens": 30}},
]  # fmt: skip


SAVED = """
    new Promise(done => {
      const opening = indexedDB.open("quire", 1);
      opening.onsuccess = () => {
        const reading = opening.result.transaction("conversations").objectStore("conversations").getAll();
        reading.onsuccess = () => {
          opening.result.close();
          const [newest] = reading.result.sort((a, b) => b.changed - a.changed);
          const last = newest?.turns.at(-1);
          done(newest?.turns.length === document.querySelectorAll(".assistant").length && Boolean(last.answer || last.calls.length));
        };
      };
    })
"""


def reload_saved(browser: Chromium, server: Served) -> None:
    """Reload the page after the browser has stored the last answer: the page stores it a few milliseconds after the answer has ended."""
    browser.until(SAVED)
    browser.open(server.url + "/")


def test_tool_calls_are_shown_as_text(browser: Chromium, server: Served):
    shown = [
        ["Tool call: <b>look</b>", '{"place": "<img src=x onerror=hit()>\u202e"}'],
        ["Tool call: f", "[](javascript:hit())"],
    ]
    calls = "[...document.querySelectorAll('.assistant .call')].map(one => [...one.children].map(part => part.textContent))"
    browser.js("Object.defineProperty(navigator, 'clipboard', {configurable: true, value: {writeText: async text => { window.copied = text; }}}); window.copied = ''; 0")  # fmt: skip
    with scripted(browser, *CALLS):
        ask(browser, "How is the weather?")
        assert browser.js(calls) == shown
        assert browser.js("document.querySelector('.assistant .text').hidden")
        assert browser.js("document.querySelector('.assistant .note').textContent").startswith("30 tokens")  # fmt: skip
        assert "<b>look</b>" in browser.js("document.getElementById('spoken').textContent")
        click(browser, ".assistant", "Copy")
        assert browser.until("window.copied").startswith('<b>look</b> {"place"')
        ask(browser, "And now?")  # calls without results are not sent again
        assert len(browser.js("bodies[1].messages")) == 1
    assert browser.js("document.querySelectorAll('#turns img, #turns b, #turns a').length") == 0
    reload_saved(browser, server)
    browser.until(f"document.querySelectorAll('.call').length === 4 && {calls}[0][0].includes('look')")  # fmt: skip
    assert browser.js("document.title") == "Quire"


def test_only_answered_turns_of_the_chat_are_sent_again(browser: Chromium):
    with scripted(browser, content("yes")):
        browser.js("document.getElementById('option-mode').value = 'text'; 0")
        ask(browser, "Once upon a time")
        assert browser.js("bodies[0].max_tokens") == 256
        browser.js("document.getElementById('option-mode').value = 'chat'; 0")
        ask(browser, "one")
        ask(browser, "two")
    assert browser.js("bodies[2].messages.map(one => one.role + ' ' + one.content)") == [
        "user one", "assistant yes", "user two",
    ]  # fmt: skip
    assert "max_tokens" not in browser.js("bodies[2]")
    with scripted(browser):  # ends before its first token
        ask(browser, "unanswered")
        ask(browser, "Hi")
        assert len(browser.js("bodies[1].messages")) == 1


def test_an_answer_is_made_again_and_a_message_is_edited(browser: Chromium):
    with scripted(browser, content("yes")):
        ask(browser, "one")
        ask(browser, "two")
        click(browser, ".assistant", "Regenerate")
        browser.until("bodies.length === 3 && !document.querySelector('.busy')")
        assert browser.js("JSON.stringify(bodies[2]) === JSON.stringify(bodies[1])")
        assert browser.js("document.querySelectorAll('.assistant').length") == 2
        browser.js("[...document.querySelector('.user').querySelectorAll('button')].at(-1).click()")
        assert browser.js("document.getElementById('words').value") == "one"
        assert browser.js("document.querySelectorAll('.replaced').length") == 4
        browser.press("Escape", 27)
        assert browser.js("document.querySelectorAll('.replaced').length") == 0
        browser.js("[...document.querySelector('.user').querySelectorAll('button')].at(-1).click()")
        browser.type(" more")
        browser.enter()
        browser.until("bodies.length === 4 && !document.querySelector('.busy')")
        assert browser.js("bodies[3].messages.map(one => one.content)") == ["one more"]
        assert browser.js("document.querySelectorAll('.assistant').length") == 1


def test_a_rate_needs_time_between_the_tokens(browser: Chromium):
    with scripted(browser, content("a b c"), {"choices": [], "usage": {"completion_tokens": 16}}):
        ask(browser, "all at once")
    assert "per second" not in browser.js("document.querySelector('.assistant .note').textContent")


def test_the_conversation_and_the_options_outlive_a_reload(browser: Chromium, server: Served):
    with scripted(browser, content("kept **bold**")):
        ask(browser, "remember")
        browser.js("""
            const system = document.getElementById("option-system");
            system.value = "be brief";
            system.dispatchEvent(new Event("change"))
        """)
    reload_saved(browser, server)
    browser.until("document.querySelector('.assistant strong')?.textContent === 'bold'")
    assert browser.js("document.querySelector('.user .text').textContent") == "remember"
    assert browser.js("document.getElementById('option-system').value") == "be brief"
    browser.js("document.getElementById('fresh').click(); document.getElementById('option-system').value = ''; 0")  # fmt: skip
    browser.js("dispatchEvent(new Event('pagehide')); 0")


def test_nothing_is_sent_while_the_model_is_loaded(browser: Chromium, server: Served):
    """Scripted: /v1/models answers 503, with the share in its message."""
    source = """
        window.loading = true; const theirs = fetch;
        window.fetch = (path, options) => path !== "v1/models" && !path.startsWith("ui/state") || !loading ? theirs(path, options)
          : Promise.resolve(new Response(JSON.stringify({error: {message: "loading the model: 40%"}}), {status: 503}));
    """
    number = browser.send("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"]
    browser.open(server.url + "/")
    browser.until("document.getElementById('status').textContent === 'loading the model: 40%'")
    browser.until("document.getElementById('loading-stage').offsetParent && document.getElementById('loading-stage').textContent === 'loading the model: 40%'")  # fmt: skip
    assert browser.js("document.getElementById('send').disabled")
    browser.js("document.getElementById('words').focus()")
    browser.type("too early")
    browser.enter()
    assert browser.js("document.querySelectorAll('.assistant').length") == 0
    assert browser.js("document.getElementById('words').value") == "too early"
    browser.js("loading = false")
    browser.until("!document.getElementById('send').disabled")
    browser.send("Page.removeScriptToEvaluateOnNewDocument", identifier=number)
    browser.js("document.getElementById('words').value = ''; 0")


def test_the_page_has_no_errors_and_no_foreign_requests(browser: Chromium, server: Served):
    refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
    invalid = refused.replace("401 (Unauthorized)", "400 (Bad Request)")  # an option
    assert set(browser.complaints()) <= {refused, invalid}
    assert browser.asked()
    assert all(url.startswith((server.url, "data:")) for url in browser.asked())


@pytest.mark.slow
def test_prompts_that_the_server_does_not_show_are_not_offered(tmp_path_factory: pytest.TempPathFactory, browser: Chromium):  # fmt: skip
    with Served(make_checkpoint(tmp_path_factory.mktemp("open"), length=256)) as keyless:
        browser.open(keyless.url + "/")
        browser.until("!document.getElementById('send').disabled")
        browser.type("Hi")
        browser.enter()
        browser.until("document.querySelector('#lives .life') !== null")
        browser.js("document.querySelector('#lives .life').click(); 0")
        assert browser.until("document.querySelector('#lives .more button')?.disabled")
        reason = browser.js("document.querySelector('#lives .more').textContent")
        assert "--api-key-file" in reason
        assert not any(keyless.url + "/ui/words" in url for url in browser.asked())
