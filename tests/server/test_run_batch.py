"""A file of requests: in order, complete, and a bad line fails alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import ScriptedEngine, make_state

from quire.cli import run_batch
from quire.server.app import build_app


def lines_of(*asked: Any) -> list[bytes]:
    return [one if isinstance(one, bytes) else json.dumps(one).encode() for one in asked]


def request(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def answered(lines: list[bytes], engine: ScriptedEngine | None = None) -> list[dict[str, Any]]:
    app = build_app(make_state(engine or ScriptedEngine("ok")))

    async def go() -> list[dict[str, Any]]:
        return [one async for one in run_batch.answers(app, lines)]

    return asyncio.run(go())


def test_answers_are_in_order_and_concurrency_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_batch, "AHEAD", 3)
    engine = ScriptedEngine("ok")
    found = answered(lines_of(*(request(n, prompt=f"p{n}") for n in range(10)), b"\n"), engine)
    assert [one["custom_id"] for one in found] == [f"r{n}" for n in range(10)]
    assert {one["response"]["status_code"] for one in found} == {200}
    assert [asked.prompt.text for asked in engine.asked] == [f"p{n}" for n in range(10)]
    assert len({one["id"] for one in found}) == 10


def test_each_route_answers_in_its_shape():
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    found = answered(
        lines_of(request(0, "/v1/chat/completions", **chat), request(1, "/v1/messages", **chat),
                 request(2, "/v1/responses", input="hi"))
    )  # fmt: skip
    bodies = [one["response"]["body"] for one in found]
    assert [body.get("object", body.get("type")) for body in bodies] == ["chat.completion", "message", "response"]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [(b"nonsense", "malformed"), (b"[]", "custom_id"), (b"{}", "custom_id"), (b"[" * 10_000, ""),
     (request(1, "/v1/embeddings", input="x"), "/v1/chat/completions"), (request(1, prompt="x", stream=True), "stream"),
     (request(1, prompt="x", n=0), "`n`"), ({**request(1, prompt="x"), "method": "GET"}, "must be POST")],
)  # fmt: skip
def test_a_bad_line_fails_alone(line: Any, words: str):
    bad, good = answered(lines_of(line, request(2, prompt="x")))
    assert bad["response"]["status_code"] == 400
    assert words in bad["response"]["body"]["error"]["message"]
    assert bad["error"] is None
    assert good["response"]["body"]["choices"][0]["text"] == "ok"


def test_the_output_appears_whole_or_not_at_all(tmp_path: Path):
    job = run_batch.read(["-i", "in", "-o", str(tmp_path / "out")])

    def fail_half_way() -> None:
        with run_batch.written(job) as out:
            out.write(b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail_half_way()
    assert not list(tmp_path.iterdir())
    with run_batch.written(job) as out:
        out.write(b"whole")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]


def test_a_batch_that_is_terminated_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"{}")

    async def run(*args: Any) -> tuple[int, int]:
        assert len(list(tmp_path.glob(".batch-*"))) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
        return 0, 0

    monkeypatch.setattr(run_batch, "run", run)
    argv = ["-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--model", "quire-tiny"]
    assert run_batch.main(argv) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == [source]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_flags(capsys: pytest.CaptureFixture[str]):
    job = run_batch.read(["-i", "a", "-o", "b", "--model", "m", "--max-model-len", "2k", "--api-key", "x"])  # fmt: skip
    assert (job.source, job.target, job.config.model.model) == ("a", "b", "m")
    assert job.config.server.api_key is None
    with pytest.raises(SystemExit) as end:
        run_batch.read(["-i", "a"])
    assert end.value.code == 2
    assert "--output-file is required" in capsys.readouterr().err


def test_files_that_cannot_be_opened_are_named_by_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    there = tmp_path / "in"
    there.touch()
    for source, target, flag in ((tmp_path / "x", there, "--input-file"), (there, tmp_path / "x/y", "--output-file")):  # fmt: skip
        assert run_batch.main(["-i", str(source), "-o", str(target)]) == 1
        assert capsys.readouterr().err.startswith(f"quire run-batch: error: {flag}")


def test_metrics_can_be_read_meanwhile():
    state = make_state(ScriptedEngine("ok"), port=0, host="127.0.0.1")

    async def go() -> tuple[str, int]:
        async with run_batch.telling(state) as where, httpx.AsyncClient() as client:
            other = await client.get(where.replace("/metrics", "/health"))
            return (await client.get(where)).text, other.status_code

    text, other = asyncio.run(go())
    assert "vllm:num_requests_running" in text
    assert other == 404
    job = run_batch.read(["-i", "a", "-o", "b", "--enable-metrics", "--url", "h", "--port", "7"])
    assert (job.metrics, job.config.server.host, job.config.server.port) == (True, "h", 7)


def test_no_such_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_batch.main(["-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")]) == 1
    assert "none" in capsys.readouterr().err
