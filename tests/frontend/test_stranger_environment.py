"""A process that renders a request's template sees no keys and tokens of the server (M7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import env
from quire.frontend import untrusted_templates


def test_the_process_of_a_template_has_no_secrets(monkeypatch: pytest.MonkeyPatch):
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "sesame")
    process = untrusted_templates.start()
    try:
        process.stdin.write((2).to_bytes(4) + b"{}")  # it has begun when it takes this
        found = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"sesame" not in found
        assert b"-P" in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    finally:
        untrusted_templates.end(process)


def test_an_empty_entry_of_pythonpath_is_no_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", ":/x::.:")
    assert env.for_a_child(A="b")["PYTHONPATH"] == env.bare_for_a_child()["PYTHONPATH"] == "/x:."
