"""`quire bench sweep serve`, with programs in place of the server and the load."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from quire.bench.__main__ import main
from quire.bench.sweep import flags, patient, read_params

SERVER = "import pathlib, sys, time; pathlib.Path('started').open('a').write(' '.join(sys.argv[1:]) + '\\n'); time.sleep(60)"
LOAD = """
import json, pathlib, sys
words = sys.argv[1:]
path = pathlib.Path(words[words.index("--result-dir") + 1], words[words.index("--result-filename") + 1])
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps({"completed": 1, "words": words[:words.index("--save-result")]}))
sys.exit("--fail" in words)
"""


def command(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return f"{sys.executable} {folder / name}"


def test_each_server_gets_each_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.json").write_text('[{"max_num_seqs": 1}, {"max_num_seqs": 2}]')
    (tmp_path / "bench.json").write_text('{"slow": {"request_rate": 1}, "fast": {"request_rate": 9, "ignore_eos": true}}')  # fmt: skip
    words = ["sweep", "serve", "--serve-cmd", command(tmp_path, "server.py", SERVER), "--bench-cmd", command(tmp_path, "load.py", LOAD),
             "--serve-params", "serve.json", "--bench-params", "bench.json", "--num-runs", "2", "-o", "out"]  # fmt: skip
    assert main([*words, "--dry-run"]) == 0
    assert not (tmp_path / "out").exists()
    assert main(words) == 0
    (summary,) = tmp_path.glob("out/*/summary.json")
    found = json.loads(summary.read_text())
    assert len(found) == 8
    assert found[-1]["words"] == ["--request-rate", "9", "--ignore-eos"]
    assert (found[-1]["serve"], found[-1]["run"]) == ({"max_num_seqs": 2}, 1)
    assert {one["bench"]["_benchmark_name"] for one in found} == {"slow", "fast"}


RESETS = """
import http.server, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        with pathlib.Path('posted').open('a') as file:
            file.write(self.path + ' ')
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
"""
LISTENS = "import socket, sys, time\nwhile socket.socket().connect_ex(('127.0.0.1', int(sys.argv[2]))): time.sleep(0.01)\n"


def test_caches_are_emptied_after_each_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Regression: a load found the prompts of the load before, and a server with a larger cache looked faster."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "bench.json").write_text('[{"a": 1}, {"a": 2}]')
    words = ["sweep", "serve", "--bench-params", "bench.json", "--num-runs", "1"]
    load = command(tmp_path, "load.py", LOAD)
    without = command(tmp_path, "other.py", SERVER)
    assert main([*words, "--serve-cmd", without, "--bench-cmd", f"{load} --port {port}"]) == 0
    assert f"POST http://127.0.0.1:{port}/reset_prefix_cache" in capsys.readouterr().err
    load = command(tmp_path, "patient.py", LISTENS + LOAD)
    server = f"{command(tmp_path, 'server.py', RESETS)} {port}"
    assert main([*words, "--serve-cmd", server, "--bench-cmd", f"{load} --port {port}"]) == 0
    assert (tmp_path / "posted").read_text() == "/reset_prefix_cache /reset_mm_cache " * 2


def test_flags_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = {
        "a_b": 1,
        "c": False,
        "d": None,
        "e": ["x", "y"],
        "f": {"g": 1},
        "_benchmark_name": "n",
    }
    assert flags(given) == ["--a-b", "1", "--no-c", "--e", "x", "y", "--f", '{"g": 1}']
    (tmp_path / "bad.json").write_text("3")
    with pytest.raises(ValueError, match="list of objects"):
        read_params(tmp_path / "bad.json")
    for words in (["sweep"], ["sweep", "serve"], ["sweep", "serve", "--serve-cmd", "a", "--bench-cmd", "b", "--serve-params", str(tmp_path / "bad.json")]):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    assert "list of objects" in capsys.readouterr().err


def test_a_load_waits_for_its_server():
    """`bench serve` gives up after 5 s if nothing listens; a server that the sweep has just started may take longer."""
    load = ["quire", "bench", "serve", "--num-prompts", "8"]
    assert patient(load) == [*load, "--ready-check-timeout-sec", "600"]
    given = [*load, "--ready_check_timeout_sec=9"]
    assert patient(given) == given
    assert patient(["load.py", "serve"]) == ["load.py", "serve"]
