"""Conversations of the page: branches, the browser's store, tools, options, examples."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chromium import PROGRAM, Chromium
from reader import ask, click, content, scripted, text
from server_process import Served

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")


@pytest.fixture(autouse=True)
def signed_in(browser: Chromium, server: Served) -> None:
    """A new tab's state, with the key; the browser's store is empty."""
    browser.until("document.getElementById('status') !== null")
    browser.js(
        "sessionStorage.clear(); sessionStorage.setItem('key', 'k'); import('./ui/page/storage.js').then(store => store.removeAll())"
    )
    browser.js("window.onpagehide = null; document.getElementById('fresh').click(); document.getElementById('options-reset').click(); 0")  # fmt: skip
    browser.open(server.url + "/")
    browser.until("!document.getElementById('send').disabled")


def shown(browser: Chromium) -> list[str]:
    found: list[str] = browser.js(
        "[...document.querySelectorAll('.said .text')].map(one => one.textContent)"
    )
    return found


def switches(browser: Chromium) -> list[str]:
    found: list[str] = browser.js(
        "[...document.querySelectorAll('.switch')].map(one => one.childNodes[1].textContent)"
    )
    return found


def press(browser: Chromium, label: str) -> None:
    """A button by its label for a screen reader."""
    browser.js(f"document.querySelector('[aria-label=\"{label}\"]').click(); 0")


def test_another_answer_and_an_edit_are_branches(browser: Chromium):
    with scripted(browser, content("yes")):
        ask(browser, "one")
        ask(browser, "two")
        click(browser, ".assistant", "Regenerate")
        browser.until("bodies.length === 3 && !document.querySelector('.busy')")
        assert switches(browser) == ["2 / 2"]
        press(browser, "Previous answer")
        assert switches(browser) == ["1 / 2"]
        browser.js(
            "[...document.querySelector('.user').querySelectorAll('button')].find(one => one.textContent === 'Edit').click()"
        )
        browser.type(" more")
        browser.enter()
        browser.until("bodies.length === 4 && !document.querySelector('.busy')")
        assert shown(browser) == ["one more", "yes"]
        assert switches(browser) == ["2 / 2"]
        press(browser, "Previous message")
        assert shown(browser) == ["one", "yes", "two", "yes"]
        browser.js(
            "[...document.querySelector('.assistant').querySelectorAll('button')].find(one => one.textContent === 'Regenerate').click()"
        )
        browser.until("bodies.length === 5 && !document.querySelector('.busy')")
        assert browser.js("bodies[4].messages.map(one => one.content)") == ["one"]


EXPORTED = """
    URL.createObjectURL = blob => { window.blob = blob; return "data:,"; };
    document.getElementById("history-export").click();
    new Promise(done => (function look() { window.blob ? done(blob.text()) : setTimeout(look, 10); })())
"""


def give_file(browser: Chromium, text: str) -> str:
    """Import a file; returns what the page says."""
    browser.js(f"""
        document.getElementById("history-note").textContent = "";
        const files = new DataTransfer();
        files.items.add(new File([{json.dumps(text)}], "x.json"));
        document.getElementById("history-file").files = files.files;
        document.getElementById("history-file").dispatchEvent(new Event("change")); 0
    """)
    return str(browser.until("document.getElementById('history-note').textContent"))


def entries(browser: Chromium) -> list[str]:
    found: list[str] = browser.js(
        "[...document.querySelectorAll('.entry b')].map(one => one.textContent)"
    )
    return found


def test_conversations_are_kept_searched_exported_deleted_and_imported(browser: Chromium):
    with scripted(browser, content("a fox <b>ran</b>")):
        ask(browser, "Tell me")
        browser.js("document.getElementById('fresh').click(); 0")
        ask(browser, "Another <i>one</i>")
    browser.js("document.getElementById('history-open').click(); 0")
    browser.until("document.querySelectorAll('.entry').length === 2")
    assert sorted(entries(browser)) == ["Another <i>one</i>", "Tell me"]
    browser.js("document.getElementById('history-search').focus()")
    browser.type("tell ME")
    assert entries(browser) == ["Tell me"]
    browser.js(
        "document.getElementById('history-search').value = ''; document.getElementById('history-search').oninput(); 0"
    )
    kept = browser.js(EXPORTED)
    assert [len(one["turns"]) for one in json.loads(kept)["conversations"]] == [1, 1]
    browser.js("for (let i = 0; i < 2; i++) document.getElementById('history-clear').click()")
    browser.until("document.querySelectorAll('.entry').length === 0")
    assert shown(browser) == []
    assert give_file(browser, kept) == "Imported: 2."
    browser.until("document.querySelectorAll('.entry').length === 2")
    browser.js(
        "[...document.querySelectorAll('.entry')].find(one => one.textContent.includes('Tell')).click()"
    )
    assert shown(browser) == ["Tell me", "a fox <b>ran</b>"]
    assert browser.js("document.querySelectorAll('#turns b, #history-list i').length") == 0


TURN = {"parent": -1, "ask": "hi", "answer": "x", "calls": [], "results": []}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "no list of conversations"),
        ({"conversations": [{"turns": 1, "leaf": 0}]}, "turns must be a list"),
        ({"conversations": [{"turns": [TURN | {"parent": 0}], "leaf": 0}]}, "parent must be"),
        ({"conversations": [{"turns": [TURN], "leaf": 1}]}, "leaf must be"),
        ({"conversations": [{"turns": [TURN | {"ask": 7}], "leaf": 0}]}, "ask must be a text"),
        (
            {"conversations": [{"turns": [TURN], "leaf": 0}, {"turns": [None], "leaf": 0}]},
            "parent must be",
        ),
        (
            {"conversations": [{"turns": [TURN], "leaf": 0, "title": "x" * 300}]},
            "title must be a text of at most 200",
        ),
    ],
)
def test_a_damaged_file_is_refused_whole(browser: Chromium, file: Any, reason: str):
    said = give_file(browser, file if isinstance(file, str) else json.dumps(file))
    assert said.startswith("Nothing was imported")
    assert reason in said
    assert (
        browser.js(
            "import('./ui/page/storage.js').then(store => store.loadAll()).then(all => all.length)"
        )
        == 0
    )


CALL = [
    {
        "choices": [
            {
                "delta": {
                    "tool_calls": [
                        {
                            "index": 0,
                            "id": "c1",
                            "function": {"name": "look", "arguments": '{"at": 1}'},
                        }
                    ]
                }
            }
        ]
    },
    {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
]


def test_the_result_of_a_tool_is_sent_to_the_model(browser: Chromium):
    with scripted(browser, *CALL):
        ask(browser, "Look")
        browser.js("document.querySelector('.results textarea').focus()")
        browser.type("<b>a tree</b>")
        browser.js("document.querySelector('.results button').click(); 0")
        browser.until("bodies.length === 2 && !document.querySelector('.busy')")
        sent = browser.js("bodies[1].messages")
    assert [one["role"] for one in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    ]
    assert sent[2] == {"role": "tool", "tool_call_id": "c1", "content": "<b>a tree</b>"}
    assert "<b>a tree</b>" in shown(browser)[2]
    assert (
        browser.js("document.querySelectorAll('.results').length") == 1
    )  # under the last answer only


def test_thoughts_have_a_duration_and_a_switch(browser: Chromium):
    events = [{"choices": [{"delta": {"reasoning": "hm"}}]}, content("so")]
    with scripted(browser, *events):
        browser.js("document.getElementById('option-thinking').value = 'off'; 0")
        ask(browser, "Think")
        assert browser.js("bodies[0].chat_template_kwargs") == {"enable_thinking": False}
    summary = browser.js("document.querySelector('.thoughts summary').textContent")
    assert summary.startswith("Thought")
    assert not browser.js("document.querySelector('.thoughts').open")


def test_every_option_reaches_the_request(browser: Chromium):
    given = {"temperature": "0.5", "max_tokens": "7", "top_p": "0.9", "top_k": "40", "min_p": "0.1", "seed": "3", "presence_penalty": "1",
             "frequency_penalty": "0.2", "repetition_penalty": "1.1", "min_tokens": "2", "thinking_token_budget": "9", "stop": "a\nb",
             "bad_words": "c", "logit_bias": '{"5": -1}', "schema": '{"type": "object"}', "tools": "[]", "system": "be brief"}  # fmt: skip
    browser.js(
        f"for (const [name, value] of Object.entries({json.dumps(given)})) document.getElementById('option-' + name).value = value; 0"
    )
    with scripted(browser, content("x")):
        ask(browser, "Hi")
        body = browser.js("bodies[0]")
        browser.js("document.getElementById('option-logit_bias').value = '{'; 0")
        ask(browser, "Hi")
        assert browser.js("bodies.length") == 1
    assert body.pop("messages")[0] == {"role": "system", "content": "be brief"}
    assert body.pop("response_format")["json_schema"]["schema"] == {"type": "object"}
    for field in ("stream", "stream_options", "model"):
        body.pop(field)
    numbers = {
        name: float(value)
        for name, value in given.items()
        if name not in ("stop", "bad_words", "logit_bias", "schema", "tools", "system")
    }
    assert body == numbers | {
        "stop": ["a", "b"],
        "bad_words": ["c"],
        "logit_bias": {"5": -1},
        "tools": [],
    }
    note = browser.js("[...document.querySelectorAll('.assistant .note')].at(-1).textContent")
    assert note.startswith("Logit bias")


def test_the_drawer_shows_the_defaults(browser: Chromium):
    assert (
        browser.until("document.getElementById('option-temperature').placeholder") == "0"
    )  # of the server's flags
    assert browser.js("document.getElementById('option-repetition_penalty').placeholder") == "1"


def test_an_empty_page_has_examples_and_a_curl_command(browser: Chromium, server: Served):
    assert text(browser, "base-url") == server.url + "/v1"
    curl = text(browser, "curl")
    assert server.url in curl
    assert "Authorization: Bearer" in curl
    assert browser.js("document.querySelectorAll('.example').length") == 3
    with scripted(browser, content("Once")):
        browser.js("document.querySelector('.example').click(); 0")
        browser.until("document.querySelector('.assistant') && !document.querySelector('.busy')")
    assert shown(browser) == ["Tell me a story about a fox.", "Once"]
    assert browser.js("document.getElementById('welcome').hidden")


def test_the_code_of_an_answer_is_copied(browser: Chromium):
    browser.js(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true, value: {writeText: async text => { window.copied = text; }}}); 0"
    )
    with scripted(browser, content("```py\nprint('<b>')\n```")):
        ask(browser, "Code")
    browser.js("document.querySelector('.copy-code').click(); 0")
    assert browser.until("window.copied") == "print('<b>')"
    assert browser.js("document.querySelector('.code-string').textContent") == "'<b>'"
