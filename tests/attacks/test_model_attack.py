"""Models by strangers: what their files may cost a server that serves them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from attacked_server import CHAT, together
from conftest import Start

from quire.models.checkpoint_locator import EMBEDDED

HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
GO = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 4}
DOUBLED = (
    "{% set ns=namespace(a=[1,1]) %}{% for i in range(30) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
    "{{ ns.a|string|length }}"
)
PADDED = "{{ 'x'.ljust(2000000000)|length }}"


@pytest.mark.attack
@pytest.mark.parametrize("trick", [DOUBLED, PADDED], ids=["doubled", "padded"])
def test_a_template_that_waits_for_a_word_harms_nobody_else(
    tmp_path: Path, started: Start, trick: str
):
    folder = tmp_path / "model"
    shutil.copytree(Path(EMBEDDED) / "quire-tiny", folder)
    source = "{% if messages[0].content == 'go' %}" + trick + "{% endif %}{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(source)
    server = started(model=str(folder))
    assert server.ask(CHAT, HELLO).status_code == 200
    with server.attack(seconds=90) as measured:
        statuses = together(3, lambda number: server.ask(CHAT, GO).status_code)
    assert set(statuses) == {400}
    measured.check()
    assert server.ask(CHAT, HELLO).status_code == 200
