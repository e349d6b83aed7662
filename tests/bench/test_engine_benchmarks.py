"""The benchmarks that start something themselves: an engine, a process, a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import scripted_server
from tiny_llama import make_checkpoint

from benchmarks import __main__ as laboratory
from benchmarks import serving_cost
from quire.bench import __main__ as bench
from quire.bench import latency, startup, throughput
from quire.bench.__main__ import main
from quire.bench.serve.endpoints import RequestRecord
from quire.errors import ConfigError, QuireError

ENGINE = ["--dtype", "float32", "--kv-cache-memory-bytes", "4M", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


def test_latency_times_each_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "a.json"
    words = ["--batch_size", "2", "--input-len", "4", "--output-len=3", "--num-iters", "3", "--num-iters-warmup", "1"]  # fmt: skip
    assert main(["latency", model, *ENGINE, *words, "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert len(result["latencies"]) == 3
    assert min(result["latencies"]) <= result["avg_latency"] <= max(result["latencies"])
    assert result["percentiles"]["50"] == pytest.approx(sorted(result["latencies"])[1])
    printed = capsys.readouterr().out
    assert f"Avg latency: {result['avg_latency']} seconds" in printed
    assert "99% percentile latency: " in printed


def test_throughput_counts_generated_tokens(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "a.json"
    words = ["--num-prompts", "5", "--input-len", "6", "--output-len", "3", "--n", "2"]
    assert main(["throughput", model, *ENGINE, *words, "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (5, 5 * 6 + 5 * 2 * 3)
    assert result["tokens_per_second"] == pytest.approx(60 / result["elapsed_time"])
    printed = capsys.readouterr().out
    assert "Total num prompt tokens:  30\nTotal num output tokens:  30" in printed
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"prompt": "a b", "output_tokens": 2}\n{"prompt": "c"}\n')
    words = ["--dataset-name", "custom", "--dataset-path", str(lines), "--num-prompts", "2"]
    assert main(["throughput", model, *ENGINE, *words, "--output-len", "4"]) == 0
    assert "Total num output tokens:  8" in capsys.readouterr().out


def test_throughput_with_adapters(capsys: pytest.CaptureFixture[str]):
    words = [
        "--num-prompts",
        "3",
        "--input-len",
        "6",
        "--output-len",
        "3",
        "--max-loras",
        "2",
        "--max-model-len",
        "64",
    ]
    words += ["--lora-path", "quire-tiny-pirate-lora"]
    assert main(["throughput", "quire-tiny", *ENGINE, *words]) == 0
    assert "Total num output tokens:  9" in capsys.readouterr().out


def test_startup_times_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    began = []

    def once(keywords: dict[str, Any], cache: str) -> tuple[float, float]:
        began.append((cache, list(Path(cache).iterdir())))
        (Path(cache) / "compiled").touch()
        return (9.0, 10.0) if not began[-1][1] else (1.0, 2.0)

    monkeypatch.setattr(startup, "once", once)
    file = tmp_path / "a.json"
    words = ["--num-iters-cold", "2", "--num-iters-warm", "3", "--output-json", str(file)]
    assert startup.main(words) == 0
    result = json.loads(file.read_text())
    assert result["cold_startup_times"] == [9.0] * 2
    assert result["warm_startup_times"] == [1.0] * 3
    assert (result["avg_cold_first_token_time"], result["avg_warm_first_token_time"]) == (10.0, 2.0)


def test_a_failed_start_reports_the_reason(tmp_path: Path):
    with pytest.raises(QuireError, match="nowhere"):
        startup.once({"model": str(tmp_path / "nowhere")}, str(tmp_path))


@pytest.mark.parametrize("module", [latency, throughput, startup])
def test_mistakes_end_with_status_2(module: Any, capsys: pytest.CaptureFixture[str]):
    for words in (["--num-promts", "3"], ["--num-iters=0"], ["--num-iters-cold=0"], ["a", "b"]):
        with pytest.raises(SystemExit) as ended:
            module.main(words)
        assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_every_command_has_a_module_and_help(capsys: pytest.CaptureFixture[str]):
    for program, command in ((bench, "quire bench"), (laboratory, "python -m benchmarks")):
        for kind in program.KINDS:
            with pytest.raises(SystemExit) as ended:
                program.main([kind, "--help"])
            assert ended.value.code == 0
            assert f"{command} {kind}" in capsys.readouterr().out or kind == "offline"
        assert program.main(["nothing"]) == 2
        assert program.main(["--help"]) == 0
    assert bench.main([]) == 2


# What serving costs


def test_costs_of_a_case_worked_by_hand():
    short = serving_cost.Loaded(
        [RequestRecord(5, latency=1, ttft=1, output_tokens=1)] * 4, 1.0, 0.02, 0.5, 0.1
    )
    long = serving_cost.Loaded([RequestRecord(5, latency=1, ttft=0.5, itls=[0.1, 0.4], output_tokens=11)] * 2, 2.0, 0.03, 1.5, 0.2)  # fmt: skip
    found = serving_cost.costs(short, long)
    assert found["api_cpu_ms_per_request"] == pytest.approx(5)
    assert found["api_cpu_us_per_token"] == pytest.approx(
        1000
    )  # 30 - 2 * 5 ms, over 20 more tokens
    assert found["output_throughput"] == pytest.approx(11)
    assert found["p50_itl_ms"] == pytest.approx(250)
    assert (found["api_cpu_share"], found["all_cpu_share"]) == (0.015, 0.75)
    assert found["prompt_tokens"] == 5
    assert found["tokens_per_event"] == pytest.approx(11 / 3)
    assert "api_cpu_ms_per_request" not in serving_cost.costs(None, long)


def test_medians_go_into_the_depth():
    rounds = [{"a": 1.0, "v": "1", "b": {1: {"c": 5.0}}}, {"a": 9.0, "v": "1", "b": {1: {"c": 4.0}}}, {"a": 2.0, "v": "1", "b": {1: {"c": 9.0}}}]  # fmt: skip
    assert serving_cost.medians(rounds) == {"a": 2.0, "v": "1", "b": {1: {"c": 5.0}}}


def test_a_server_is_started_loaded_and_stopped(capsys: pytest.CaptureFixture[str]):
    command = f"{sys.executable} {scripted_server.__file__} {{port}}"
    found: dict[str, Any] = {}

    async def look() -> None:
        async with serving_cost.started("wire", command, "m") as running:
            found["process"] = running.process
            assert running.model == "m/toy"
            assert serving_cost.cpu_seconds([running.process.pid]) > 0

    asyncio.run(look())
    assert found["process"].returncode is not None

    async def fail() -> None:
        async with serving_cost.started("no", f"{sys.executable} -c 'print(1/0)' {{port}}", "m"):
            pass

    with pytest.raises(QuireError, match=r"(?s)no did not start.*ZeroDivision"):
        asyncio.run(fail())

    async def miss() -> None:
        async with serving_cost.started("no", "/no/such/server {gguf} {port}", "m"):
            pass

    with pytest.raises(QuireError, match=r"no did not start: .*/no/such/server"):
        asyncio.run(miss())
    with pytest.raises(ConfigError, match="NAME=COMMAND"):
        serving_cost.named("vllm serve")


def test_the_whole_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(
        serving_cost, "QUIRE", f"ours={sys.executable} {scripted_server.__file__} {{port}}"
    )
    peer = f"theirs={sys.executable} {scripted_server.__file__} {{port}}"
    words = ["--clients", "1", "3", "--requests", "2", "--rounds", "1", "--flags", "", "--peer", peer, "--output-len"]  # fmt: skip
    assert serving_cost.main([*words, "3"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    rows = [cells for cells in lines if cells[0] in ("| ours", "| theirs") and len(cells) > 7]
    assert [cells[1] for cells in rows] == ["1", "3", "1", "3"]
    assert all(float(cells[2]) > 10 for cells in rows)  # tokens a second
    assert {tuple(cells[7:9]) for cells in rows} == {("7.00", "1.00")}  # tokens/prompt, and /event
    assert [cells[:2] for cells in lines if len(cells) == 7][1:] == [["| theirs", "1"], ["| theirs", "3"]]  # fmt: skip
    assert serving_cost.main([*words, "4", "--no-request-cost"]) == 1
    assert "ours, 4 clients, warm-up: 4 answers are not 4 tokens long" in capsys.readouterr().err


def test_a_peer_that_fails_in_a_later_round_keeps_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    own = f"ours={sys.executable} {scripted_server.__file__} {{port}}"
    monkeypatch.setattr(serving_cost, "QUIRE", own)
    once = f"test ! -e {tmp_path}/started && touch {tmp_path}/started && exec {sys.executable} {scripted_server.__file__} {{port}}"
    words = ["--clients", "1", "--requests", "1", "--rounds", "2", "--flags", "", "--no-request-cost", "--output-len", "3"]  # fmt: skip
    assert serving_cost.main([*words, "--peer", f"theirs=sh -c '{once}'"]) == 0
    shown = capsys.readouterr()
    assert "theirs leaves the run in round 2: theirs did not start" in shown.err
    assert "| theirs | 1 |" in shown.out
    assert serving_cost.main([*words, "--peer", f"theirs=sh -c '{once}'"]) == 1  # never ran


def test_sigterm_ends_the_server_of_a_benchmark(tmp_path: Path):
    started = tmp_path / "pid"
    peer = f"sh -c 'echo $$ > {started}; exec {sys.executable} {scripted_server.__file__} {{port}}'"
    words = ["--clients", "1", "--rounds", "1000", "--output-len", "3", "--flags", "", "--peer", f"theirs={peer}"]  # fmt: skip
    code = f"import sys; from benchmarks import __main__, serving_cost; serving_cost.QUIRE = {f'ours={peer}'!r}"
    ran = subprocess.Popen(
        [sys.executable, "-c", f"{code}; sys.exit(__main__.main({['serving', *words]}))"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not (started.exists() and started.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.05)
    ran.send_signal(signal.SIGTERM)
    assert ran.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
