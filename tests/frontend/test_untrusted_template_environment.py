"""The process that renders a request's template gets no keys and tokens of the server (M7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import env
from quire.frontend import untrusted_templates
from quire.frontend.chat import ChatOptions

MESSAGES = [{"role": "user", "content": "hi"}]


def test_the_process_of_a_template_has_no_secrets(monkeypatch: pytest.MonkeyPatch):
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "sesame")
    renderer = untrusted_templates.UntrustedTemplateRenderer(seconds=60.0)
    try:
        # An answer shows that the program has started: between execve and the first page of the new program, both files are empty.
        assert renderer.render(MESSAGES, ChatOptions(template="done"), {}) == "done"
        [process] = renderer.idle
        assert b"sesame" not in Path(f"/proc/{process.process.pid}/environ").read_bytes()
        assert b"-P" in Path(f"/proc/{process.process.pid}/cmdline").read_bytes().split(b"\0")
    finally:
        renderer.close()


def test_an_empty_entry_of_pythonpath_is_removed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", ":/x::.:")
    assert env.for_a_child(A="b")["PYTHONPATH"] == env.bare_for_a_child()["PYTHONPATH"] == "/x:."
