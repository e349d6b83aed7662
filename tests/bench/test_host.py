"""The host's share of a step, and the cost of streaming: the arithmetic, and one run of each on a tiny model."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import host_overhead, model_load, streaming_cost
from benchmarks.__main__ import main
from benchmarks.host_overhead import HostCost, Stopwatch
from quire.ops.cpu.bindings import best


def test_timed_parts_add_up_to_the_step():
    spent = {
        "plan": 1.0, "batch": 2.0, "forward": 10.0, "head": 4.0, "finish": 7.0, "launch": 20.0, "result": 0.5, "commit": 1.5,
        "publish": 0.25,
    }  # fmt: skip
    parts, model = host_overhead.parts(spent, 30.0)
    assert model == 14.0
    assert parts == {
        "plan": 1.0, "batch": 2.0, "launch": 1.0, "sample": 3.5, "commit": 1.5, "publish": 0.25, "other": 6.75
    }  # fmt: skip
    assert sum(parts.values()) + model == 30.0


def test_a_step_that_is_one_call_is_the_models():
    parts, model = host_overhead.parts(
        {"plan": 1.0, "whole": 17.0, "launch": 20.0, "result": 0.5}, 30.0
    )
    assert (model, parts["launch"], parts["other"]) == (17.0, 3.0, 8.5)


def test_share_and_verdict():
    parts = dict.fromkeys(host_overhead.HOST, 0.1)
    cost = HostCost(1, parts, model=97.5, step=100.0)
    assert cost.share == pytest.approx(0.025)
    assert "goal 3%: met" in cost.line("qwen3-0.6b")
    assert "goal" not in cost.line("tiny")
    assert "missed" in HostCost(1, parts, model=96.0, step=100.0).line("qwen3-0.6b")


def test_a_stopwatch_accumulates_until_read(monkeypatch):
    clock = iter([0.0, 0.002, 1.0, 1.003])
    monkeypatch.setattr(host_overhead.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch()
    double = watch.around("double", lambda n: 2 * n)
    assert (double(1), double(2)) == (2, 4)
    assert watch.read() == {"double": pytest.approx(5.0)}
    assert watch.read() == {}


def test_host_measures_the_real_engine(tmp_path, capsys):
    words = ["host", "--shape", "tiny", "--rows", "1", "4", "--steps", "3", "--cache", str(tmp_path)]  # fmt: skip
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["1", "4"]
    assert len(list((tmp_path / "out").glob("*-host-*.md"))) == 1
    kept = json.loads(next((tmp_path / "out").glob("*-host-*.json")).read_text())
    assert all(row["model"] > 0 for row in kept["rows"])


@pytest.mark.skipif(best() is None, reason="no native kernels run here")
def test_step_implementations_run_interleaved(tmp_path, capsys):
    words = ["paths", "--model", "tiny-llama", "--rows", "2", "--steps", "3"]
    assert main([*words, "--cache", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r" +2 rows  native step .*  fused decoder .*  modules .*", line)


def test_streaming_is_set_against_its_own_round():
    seconds = {"offline": [1.0, 2.0, 9.0], "streaming": [1.25, 2.5, 10.0], "generator": [0.1, 0.1, 0.1]}  # fmt: skip
    assert streaming_cost.cost_of(seconds) == pytest.approx(0.2)
    found = {"clients": 4, "tokens": 100, "seconds": seconds}
    assert "| 4 | 50.0 | 40.0 | 20.0% | 5% | 0.04 |" in streaming_cost.table(found)


def test_load_memory_is_reported_above_the_baseline():
    start = {"seconds": 5.0, "base": 100 << 20, "weights": 500 << 20, "peak": 650 << 20, "held": 610 << 20}  # fmt: skip
    text = model_load.table({"none": [start], "int8": [start | {"peak": 700 << 20}]})
    assert "| bfloat16 | 500 | 100 | 650 | 610 | 110% | 115% | 5.0 | 8 |" in text
    assert "| int8 | 500 | 100 | 700 | 610 | 120% | 115% | 5.0 | 8 |" in text
    assert model_load.anonymous("self") > 1 << 20
    assert model_load.anonymous(0) == 0
