"""The page: whole in itself, open to everybody, and without anybody's data."""

from __future__ import annotations

import re

from asgi import ask
from scripted import ScriptedEngine, make_state


def test_nothing_is_fetched_from_elsewhere():
    answer = ask(ScriptedEngine(), "GET", "/")
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.findall(r"https?://|//\w+\.\w+|@import|url\(", answer.text.replace("//", "", 0))
    policy = answer.headers["content-security-policy"]
    nonce = re.findall(r"script-src 'nonce-([^']+)'", policy)[0]
    assert answer.text.count(f'nonce="{nonce}"') == 2
    assert "default-src 'none'" in policy
    assert ask(ScriptedEngine(), "GET", "/").headers["content-security-policy"] != policy


def test_the_page_is_open_and_what_it_shows_is_not():
    state = make_state(ScriptedEngine(), api_key="k")
    assert ask(None, "GET", "/", state=state).status_code == 200
    assert ask(None, "GET", "/ui/state", state=state).status_code == 401
    seen = ask(None, "GET", "/ui/state", headers={"Authorization": "Bearer k"}, state=state)
    assert seen.status_code == 200
    assert seen.json()["memory"] > 0


def test_nobody_looks_nothing_is_asked_of_the_engine():
    engine = ScriptedEngine()
    ask(engine, "GET", "/")
    assert engine.called == []


def test_it_can_be_turned_off():
    for path in ("/", "/ui/state"):
        assert ask(ScriptedEngine(), "GET", path, disable_ui=True).status_code == 404
