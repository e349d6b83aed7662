"""What a reader of the page does and sees, for its tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chromium import Chromium


def text(browser: Chromium, id: str) -> str:
    return str(browser.js(f"document.getElementById('{id}').textContent"))


def click(browser: Chromium, place: str, label: str) -> None:
    """Click a button of the last element of a class."""
    browser.js(f"""
        [...[...document.querySelectorAll("{place}")].at(-1).querySelectorAll("button")]
            .find(button => button.textContent === "{label}").click()
    """)


@contextmanager
def scripted(browser: Chromium, *events: dict[str, Any]) -> Iterator[None]:
    """The server's answers to a chat or a completion are these events, a byte at a time; `bodies` keeps the requests."""
    text = "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in events)
    frames = ": keep-alive\n\n" + text + "data: [DONE]\n\n"
    browser.js(f"""
        window.ours = fetch;
        window.bodies = [];
        window.fetch = (path, options) => {{
            if (!/^v1.*completions$/.test(path)) return ours(path, options);
            bodies.push(JSON.parse(options.body));
            const bytes = new TextEncoder().encode({json.dumps(frames)});
            return Promise.resolve(new Response(new ReadableStream({{start(to) {{
                for (const byte of bytes) to.enqueue(new Uint8Array([byte]));
                to.close();
            }}}})));
        }};
        document.getElementById("fresh").click();
        0
    """)
    try:
        yield
    finally:
        browser.js("window.fetch = ours; 0")


def ask(browser: Chromium, words: str) -> None:
    """Send a message, and wait for the end of its answer."""
    turns = browser.js("document.querySelectorAll('.assistant').length")
    browser.js("document.getElementById('words').focus()")
    browser.type(words)
    browser.enter()
    browser.until(
        f"document.querySelectorAll('.assistant').length > {turns} && !document.querySelector('.busy')"
    )


def content(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "text": text, "finish_reason": "stop"}]}
