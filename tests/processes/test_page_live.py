"""The page at work: its script, a document that has just enough of one, and a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import Served
from tiny_llama import make_checkpoint


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the page's script")
def test_a_message_is_answered_and_the_engine_is_seen(tmp_path: Path):
    flags = [
        "--served-model-name",
        "tiny",
        "--api-key",
        "k",
        "--override-generation-config",
        '{"temperature": 0}',
    ]
    with Served(make_checkpoint(tmp_path), *flags) as server:
        words = ["node", str(Path(__file__).parent / "page.mjs"), server.url, "k"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        server.client.headers["Authorization"] = "Bearer k"
        asked = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
        expected = server.post("/v1/chat/completions", **asked)["choices"][0]["message"]["content"]
        assert seen["said"] == [["said user", "Hi"], ["said assistant", expected]]
        assert seen["name"] == "tiny"
        engine = server.client.get("/ui/state").json()["engine"]
        assert seen["cells"] == len(engine["cells"]) == engine["stats"]["num_blocks"]
        assert seen["steps"] > 0
