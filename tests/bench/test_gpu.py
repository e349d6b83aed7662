"""The GPU's one call, on the CPU in Triton's interpreter: every section runs, and one that fails does not take the rest."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")
import fake_cuda_device
import triton_interpreter  # noqa: F401
from worker.test_graphs import Capturer

from benchmarks.gpu import checks, engine, peers, timing
from benchmarks.gpu import run as gpu
from benchmarks.gpu.fixtures import (
    CONFIGS,
    client_of,
    kv_of,
    prefill_flops,
    weights_of,
    write_config,
)
from quire.ops.dispatch import OPS
from quire.platforms.cpu import CpuPlatform


def ran(tmp_path: Path, *only: str) -> tuple[int, dict]:
    with np.errstate(all="ignore"):
        words = ["--device", "cpu", "--small", "--inside", "--out", str(tmp_path), "--only", *only]
        code = gpu.main(words)
    return code, json.loads(next(tmp_path.glob("*-gpu.json")).read_text())


@pytest.fixture(autouse=True)
def environment_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark turns the CPU kernels off in its own process, which runs the tests here."""
    monkeypatch.setenv("QUIRE_CPU_ISA", "none")


@pytest.mark.slow
def test_sections_that_need_no_kernels(tmp_path: Path) -> None:
    code, found = ran(tmp_path, "machine", "engine", "steps", "serving", "peer-loop", "peer-vllm")
    assert code == 0
    assert found["machine"]["bytes"] > 0
    assert found["machine"]["fp8 flops"] > 0
    for way in ("depth 2, graphs", "weights from the host"):
        assert found["engine"][way] == "6 of 6 texts are the CPU's"
    assert found["steps"]["decode of 3 rows"]["tokens a second"] > 0
    assert found["steps"]["decode of 1 rows"]["microseconds of the host"] > 0
    assert found["steps"]["mixed load"]["ITL"]["p99 ms"] > 0
    assert found["steps"]["mixed load"]["floors, ms"]["ITL p99"] >= 0
    assert found["machine"]["int8 flops"] > 0
    assert found["serving"]["output tokens a second"] > 0
    assert found["peer-loop"]["output tokens"] == found["peer-loop"]["of"]
    assert "vllm" in found["peer-vllm"]["absent"]
    assert not list(tmp_path.glob("*.part"))


def test_the_next_call_continues_with_unfinished_sections(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """What fits is done, in order; what was done well is kept; what failed, or is named, is done again."""
    ran, failing = list[str](), ["kernels"]

    def section(name: str, run: gpu.Run, path: Path) -> dict[str, Any]:
        ran.append(name)
        if name in failing:
            failing.remove(name)
            return {"failed": "lost"}
        return {"flops": 3.0} if name == "machine" else {"rate": run.ceilings["fp8 flops"]}

    def call(*more: str) -> list[str]:
        ran.clear()
        gpu.main(["--device", "cpu", "--inside", "--out", str(tmp_path), *more])
        return list(ran)

    monkeypatch.setattr(gpu, "section", section)
    sizes = {"machine": 10, "kernels": 60, "engine": 300, "steps": 50}
    monkeypatch.setattr(gpu, "SECTIONS", {name: ("", "", most) for name, most in sizes.items()})
    assert call("--seconds", "100") == ["machine", "kernels", "steps"]
    assert "see kernels; still to do: engine" in capsys.readouterr().out
    assert call("--seconds", "400") == ["engine", "kernels"]
    assert call("--seconds", "400", "--only", "steps") == ["steps"]
    assert call() == []
    found = json.loads(next(tmp_path.glob("*-gpu.json")).read_text())
    assert found == {
        "machine": {"flops": 3.0}, "kernels": {"rate": 6.0}, "steps": {"rate": 6.0}, "engine": {"rate": 6.0},
    }  # fmt: skip
    assert "all well" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        call("--only", "step")


def test_midnight_between_two_calls(tmp_path: Path) -> None:
    noon = 1_700_000_000 // gpu.DAY * gpu.DAY + gpu.DAY // 2
    file = gpu.result_file(tmp_path, noon)
    assert file.name == "2023-11-14-gpu.json"
    file.write_text(json.dumps({"machine": {"flops": 3.0}}))
    assert gpu.result_file(tmp_path, noon + gpu.DAY) == file
    assert gpu.result_file(tmp_path, noon + 2 * gpu.DAY).name == "2023-11-16-gpu.json"
    file.write_text(json.dumps({name: {} for name in gpu.SECTIONS}))
    assert gpu.result_file(tmp_path, noon + gpu.DAY).name == "2023-11-15-gpu.json"


def test_a_failing_section_does_not_stop_the_others(tmp_path: Path, monkeypatch) -> None:
    def broken(run, found) -> None:
        raise RuntimeError("no such instruction")

    def half(run, found) -> None:
        found["bytes"] = 5.0
        raise ZeroDivisionError

    for name in ("rows", "attention", "sampling", "float8"):
        monkeypatch.setattr(checks, name, broken)
    monkeypatch.setattr(gpu, "machine", half)
    code, found = ran(tmp_path, "machine", "kernels")
    assert code == 1
    assert found["machine"]["failed"] == "ZeroDivisionError: "
    assert found["machine"]["bytes"] == 5
    assert found["kernels"]["wrong"][0] == "rows: RuntimeError: no such instruction"
    assert found["kernels"]["bits"]["torch.float32: one program a row or three"] is True


def test_8_bit_floats_are_checked(tmp_path: Path) -> None:
    found: dict[str, Any] = {"wrong": [], "distances": {}, "bits": {}}
    checks.float8(gpu.Run("cpu", 100, True), found)
    assert found["wrong"] == []
    assert found["bits"]["codes of 40 tokens by 32"] is True
    assert len(found["distances"]) == 6


def test_int8_is_checked(tmp_path: Path) -> None:
    found: dict[str, Any] = {"wrong": [], "bits": {}}
    checks.int8(gpu.Run("cpu", 100, True), found)
    assert found["wrong"] == []
    assert len(found["bits"]) == 7


def test_weights_of_few_bits_are_checked(tmp_path: Path) -> None:
    found: dict[str, Any] = {"wrong": [], "distances": {}}
    checks.few_bits(gpu.Run("cpu", 100, True), found)
    assert found["wrong"] == []
    assert len(found["distances"]) == 3


def test_calls_are_recorded_to_be_timed(monkeypatch) -> None:
    """Twice to warm up, then as often as a graph has them; what cannot be recorded is called as it is."""
    calls: list[str] = []
    run = gpu.Run("cuda", 100, True)
    monkeypatch.setattr(timing, "CACHE", 64)
    with fake_cuda_device.chosen(monkeypatch):
        assert timing.cold(run, lambda: calls.append("a"), times=3) == 1e-9  # all take 1 ms there
        assert len(calls) == 2 + 3
        monkeypatch.setattr(timing, "_recorded", fails)
        assert timing.cold(run, lambda: calls.append("a"), times=3) == 1e-3
        assert len(calls) == 5 + 3 + 3


def fails(call, times: int) -> float:
    raise RuntimeError("it cannot be recorded")


def test_a_hanging_section_is_stopped_and_its_results_are_kept(tmp_path: Path, monkeypatch) -> None:
    """In a process of its own, which here is one that notes a figure and sleeps."""
    script = tmp_path / "child.py"
    script.write_text(
        "import sys, time, json; at = sys.argv[sys.argv.index('--file') + 1]\n"
        "open(at, 'w').write(json.dumps({'bytes': 3.0})); time.sleep(600)\n"
    )
    real, piece = gpu.subprocess.Popen, tmp_path / "piece"

    def hanging(words: list[str], **how: Any) -> subprocess.Popen[bytes]:
        child = real([words[0], str(script), *words[4:]], **how)
        while not (piece.is_file() and piece.read_text().endswith("}")):
            time.sleep(0.01)
        return child

    monkeypatch.setattr(gpu.subprocess, "Popen", hanging)
    monkeypatch.setattr(gpu, "GRACE", 0.0)
    asked = argparse.Namespace(device="cpu", small=True)
    began = time.monotonic()
    found = gpu.apart("machine", gpu.Run("cpu", 0.2, True), piece, asked)
    assert time.monotonic() - began < 60
    assert found["bytes"] == 3
    assert found["failed"].startswith("it was stopped after")


@pytest.mark.slow
def test_a_section_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--small", "--out", str(tmp_path), "--only", "machine"]
    assert gpu.main(words) == 0
    found = json.loads(next(tmp_path.glob("*-gpu.json")).read_text())
    assert found["machine"]["bytes"] > 0


@pytest.mark.slow
def test_sizes_are_recorded_on_request(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(CpuPlatform, "kernels", ("triton", "reference"))
    monkeypatch.setattr(CpuPlatform, "graph_capturer", lambda self: Capturer())
    for op in OPS.values():
        monkeypatch.setattr(op, "run", op.run)  # so that it comes back
    monkeypatch.setitem(CONFIGS, "tiny", {**CONFIGS["tiny"], "num_hidden_layers": 1})
    write_config(tmp_path, "tiny")
    options = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}
    with (
        np.errstate(all="ignore"),
        client_of(
            str(tmp_path), block_size=16, attention_backend="triton_attn", **options
        ) as client,
    ):
        engine.record(client, [2])
        assert engine._recorded(client) == [2]


def test_the_plain_loop_is_a_model(monkeypatch) -> None:
    """Its steps go on where its prompts end: the same next token as of the longer prompt, greedily."""
    torch.manual_seed(0)
    model = peers.Plain("tiny", 3, 64, "cpu", torch.float32)
    model.table.mul_(40)
    monkeypatch.setattr(model, "drawn", lambda x: (x @ model.table.T).argmax(-1))
    ids = torch.arange(5, 25)
    want = [int(model.prefill(row, ids[: 10 + row])) for row in range(3)]
    for row in range(3):
        model.prefill(row, ids[: 9 + row])
    positions = torch.tensor([9, 10, 11])
    assert model.decode(ids[positions], positions, 32).tolist() == want
    assert len(set(want)) > 1


def test_floors_of_a_load_are_those_of_a_card_that_waits_for_nothing() -> None:
    """Step after step of such a card: each takes its floor."""
    run, cost = gpu.Run("cuda", 100, False), engine.Cost("llama-8b", 2.0, "flops")
    run.ceilings = {"bytes": 4e12, "flops": 7e14}
    rate, prompt, count = 10.0, 1024, 256
    now, came, left, gaps, first = 0.0, 0, list[int](), list[float](), list[float]()
    while came < 100:
        due = came / rate
        prompts = due <= now
        came += prompts
        seconds = (
            prefill_flops("llama-8b", prompt) / 7e14 if prompts else weights_of("llama-8b") / 4e12
        )
        seconds += sum(prompt + count - n for n in left) * kv_of("llama-8b") / 4e12
        now += seconds
        first += [now - due] if prompts else []
        gaps += [seconds] * len(left)
        left = [n - 1 for n in left if n > 1] + ([count - 1] if prompts else [])
    got = engine.floors_of_load(run, cost, rate, prompt, count)
    seen = engine._spread(gaps[len(gaps) // 2 :])
    assert got["ITL p50"] == pytest.approx(seen["p50 ms"], rel=0.05)
    assert got["ITL p99"] == pytest.approx(seen["p99 ms"], rel=0.05)
    assert got["TTFT"] == pytest.approx(1e3 * min(first), rel=0.02)
    assert engine.floors_of_load(run, cost, 100.0, prompt, count) == {}


def test_the_device_is_idle_between_its_spans() -> None:
    spans = [(0.0, 1.0), (1.0, 2.0), (10.0, 14.0), (12.0, 16.0), (17.0, 20.0), (18.0, 19.0)]
    assert engine._share_idle([*spans[:2], *spans[:2], *spans[2:]]) == 0.1


def test_floors_are_those_of_the_published_sizes() -> None:
    """8.03 billion weights, of which the embedding's 0.53 are not read; 128 KiB of keys and values a token."""
    assert weights_of("llama-8b") == pytest.approx(2 * (8.03e9 - 0.525e9), rel=0.01)
    assert weights_of("llama-8b", 1.0) == pytest.approx(8.03e9 - 0.525e9 + 0.525e9, rel=0.01)
    assert prefill_flops("llama-8b", 8192) == pytest.approx(2 * 6.98e9 * 8192 + 1.76e13, rel=0.01)
    assert kv_of("llama-8b") == 128 << 10
    assert {"tiny", "llama-8b", "qwen3-0.6b"} == set(CONFIGS)
