"""C3: files that lie in the working directory, and names in a checkpoint's config.json, are never imported."""

from __future__ import annotations

import json
from pathlib import Path

from server_process import Served
from tiny_llama import make_checkpoint

PLANTED = """
import pathlib, sys
(pathlib.Path(__file__).parent / f"ran-{__name__}").write_text(" ".join(sys.orig_argv))
raise ImportError("planted")
"""
WANTED = ("torch", "uvicorn", "msgspec", "zmq", "jinja2", "transformers", "flash_attn", "evil")
"""Modules that the server, its HTTP processes, the engine, the worker or the renderer of templates look for."""


def test_a_server_imports_nothing_from_its_working_directory(tmp_path: Path):
    """The review's C3a and C3b: `cd MODEL && quire serve .` ran MODEL/torch.py, and imported what config.json named."""
    make_checkpoint(tmp_path)
    for name in WANTED:
        (tmp_path / f"{name}.py").write_text(PLANTED)
    config = tmp_path / "config.json"
    mark = {"__by_name__": "evil:x"}
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "zz": mark, "a": [{"b": mark}]})
    )
    flags = ["--api-server-count", "2", "--distributed-executor-backend", "mp"]
    flags += ["--trust-request-chat-template", "--served-model-name", "tiny"]
    with Served(".", *flags, cwd=str(tmp_path)) as server:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        told = [{"role": "user", "content": "hi"}]
        found = server.post(
            "/v1/chat/completions", messages=told, chat_template=template, max_tokens=2
        )
        assert found["usage"]["completion_tokens"] >= 1
    ran = {path.name: path.read_text() for path in tmp_path.glob("ran-*")}
    assert not ran
