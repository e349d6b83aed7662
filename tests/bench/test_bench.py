"""The benchmark's arithmetic, its result files, and one whole run on a tiny model with a made-up engine."""

from __future__ import annotations

import argparse
import json
import math
import time

import pytest
import torch

from benchmarks import result_files, scheduler_step
from benchmarks.__main__ import main
from benchmarks.host_overhead import HOST, HostCost
from benchmarks.offline import run as offline
from benchmarks.offline.runners import Run, agreement
from benchmarks.roofline import FLOOR, Probe, Shares, seconds
from benchmarks.shapes import SHAPES, WORKLOADS, Shape, Workload, checkpoint, config_of

TINY = SHAPES["tiny"]
HYBRIDS = ["qwen3.5-0.8b", "granite-4.0-h-350m", "nemotron-h-4b-9l"]


def test_shape_counts_the_parameters_of_its_checkpoint():
    for shape in SHAPES.values():
        sizes = {name: math.prod(size) for name, size in shape.tensors() if len(size) > 1}
        read = sum(sizes.values())
        if "lm_head.weight" in sizes:  # then the embeddings are looked up alone
            read -= shape.head_parameters
        assert read == shape.layer_parameters + shape.head_parameters
    assert SHAPES["qwen3-0.6b"].layer_parameters == 440_401_920
    assert SHAPES["qwen3-0.6b"].kv_elements * 2 == 114_688  # bytes a token in bfloat16


def test_a_step_reads_the_experts_that_its_tokens_choose():
    shape = SHAPES["moe-1.8b"]
    assert shape.used_parameters == shape.dense_parameters + shape.expert_parameters / 16
    assert shape.read_parameters(1) == pytest.approx(shape.used_parameters)
    assert shape.read_parameters(1000) == pytest.approx(shape.layer_parameters)


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-gemma", "phi-4-mini-8l", *HYBRIDS])
def test_tensors_are_those_of_transformers(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[name]
    config = AutoConfig.for_model(**config_of(shape, "bfloat16"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {p.numel() for p in model.parameters()}
    total = sum(p.numel() for p in model.parameters())
    assert total == sum(math.prod(size) for _, size in shape.tensors())
    if not shape.experts:  # Transformers holds them in one tensor
        assert sizes == {math.prod(size) for _, size in shape.tensors()}


def test_checkpoint_loads_in_transformers_and_is_written_once(tmp_path):
    from transformers import AutoModelForCausalLM

    path = checkpoint(TINY, "float32", tmp_path)
    made = (path / "model.safetensors").stat().st_mtime_ns
    model, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"] | told["unexpected_keys"]
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert matrices == TINY.layer_parameters + TINY.head_parameters
    assert checkpoint(TINY, "float32", tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == made


def test_floor_of_a_case_worked_by_hand():
    shape = Shape("one", layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ff=1, vocab=3)
    assert (shape.layer_parameters, shape.head_parameters, shape.kv_elements) == (7, 3, 2)
    slow_memory = Probe(bytes_per_s=10.0, flops_per_s=1e12)
    # weights: 10 elements of 2 bytes = 2 s a step, two steps; KV of 4 tokens + 1: 5 * 2 * 2 bytes = 2 s
    assert seconds(shape, Workload(1, 4, 2), 2, slow_memory, FLOOR) == pytest.approx(6.0)
    slow_compute = Probe(bytes_per_s=1e12, flops_per_s=2.0)
    # prompt: 2 * (7 * 4 + 3) flops, scores 2 * 16; then one token: 2 * 10 flops
    assert seconds(shape, Workload(1, 4, 2), 2, slow_compute, FLOOR) == pytest.approx(31 + 16 + 10)
    halved = Shares(0.5, 0.5, 0.5, 0.5)
    assert seconds(shape, Workload(1, 4, 2), 2, slow_memory, halved) == pytest.approx(12.0)


def test_agreement_stops_at_the_first_difference():
    assert agreement([[1, 2, 3]], [[1, 2, 3]]) == 1.0
    assert agreement([[1, 9, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]) == pytest.approx(4 / 6)


def test_prompts_are_the_same_in_every_run_and_share_nothing():
    workload = Workload(8, 16, 4)
    prompts = workload.prompts(512)
    assert prompts == workload.prompts(512)
    assert len({tuple(p[:4]) for p in prompts}) == 8
    assert {len(p) for p in prompts} == {16}


def test_cost_of_a_step_is_measured_with_all_rows(monkeypatch):
    cost = scheduler_step.measure(8, steps=20, depth=2)
    assert 0 < cost.total <= cost.worst
    assert max(cost.plan, cost.commit) <= cost.total
    make = scheduler_step.make_scheduler
    monkeypatch.setattr(scheduler_step, "make_scheduler", lambda rows, *more: make(rows - 1, *more))
    with pytest.raises(RuntimeError, match="7 of 8 rows were planned"):
        scheduler_step.measure(8, steps=20)


class MadeUp:
    """Answers with the right number of tokens after a while."""

    def __init__(self, name: str):
        self.name, self.closed = name, False

    def run(self, workload, prompts):
        time.sleep(0.001)
        return Run(0.5 if self.name == "quire" else 1.0, [[7] * workload.output for _ in prompts])

    def close(self):
        self.closed = True


def test_whole_run_writes_a_result_and_compares_with_the_last(tmp_path, monkeypatch, capsys):
    ours, peer = MadeUp("quire"), MadeUp("transformers")
    monkeypatch.setattr(offline, "_engine", lambda *_: ours)
    monkeypatch.setattr(offline.roofline, "probe", lambda _: Probe(1e10, 1e12))
    monkeypatch.setattr(offline, "Transformers", lambda *_: peer)
    monkeypatch.setattr(scheduler_step, "measure_all", lambda: [scheduler_step.measure(4, steps=5)])
    parts = dict.fromkeys(HOST, 0.25)
    made_up = [HostCost(4, parts, model=98.0, step=100.0)]
    monkeypatch.setattr(
        offline.host_overhead, "measure_all", lambda shape, cache, rows, count: made_up
    )
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    assert parser.parse_args([]).shape == ["qwen3-0.6b", "llama-3.2-1b"]
    words = [
        "--shape",
        "tiny",
        "tiny-llama",
        "--rounds",
        "2",
        "--out",
        str(tmp_path / "results"),
        "--cache",
        str(tmp_path),
    ]
    assert offline.run(parser.parse_args(words)) == 0
    assert ours.closed
    assert peer.closed
    (first,) = (tmp_path / "results").glob("*-tiny-[!l]*.json")
    assert len(list((tmp_path / "results").glob("*-tiny-llama-*"))) == 2
    page = first.with_suffix(".md")
    assert "| 4 | 100.000 | 98.000 | 2.000 | 2.0% | 0.250 |" in page.read_text()
    result = json.loads(first.read_text())
    assert [row["workload"] for row in result["workloads"]] == [w.name for w in WORKLOADS]
    row = result["workloads"][2]
    assert row["speed_of_peer"] == 2.0
    assert row["output_tokens_per_s"] == {"quire": 8 * 64 / 0.5, "transformers": 8 * 64 / 1.0}
    assert row["agreement"] == 1.0
    assert row["floor_s"] <= row["predicted_s"]
    assert len(result["probes"]) == 3
    assert [row["share"] for row in result["host"]] == [0.02]
    assert page.read_text() in capsys.readouterr().out
    assert offline.run(parser.parse_args([*words, "--no-peer", "--workloads", "8x128/64"])) == 0
    assert "| 8x128/64 | 0.5 | 1.02e+03 |" in capsys.readouterr().out
    assert len(list((tmp_path / "results").iterdir())) == 8  # the first was not overwritten


def test_the_last_result_is_the_last(tmp_path):
    known = {"shape": "tiny", "dtype": "float32"}
    for name in (
        "2026-01-02-cpu-2c",
        "2026-01-03-cpu-2c",
        *[f"2026-01-03-cpu-2c-{n}" for n in (2, 10, 9)],
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({**known, "name": name}))
    (tmp_path / "2026-01-04-cpu-2c.json").write_text(json.dumps({**known, "dtype": "bfloat16"}))
    found = result_files.last_like(known, tmp_path, "cpu-2c")
    assert found["name"] == "2026-01-03-cpu-2c-10"
    assert result_files.last_like(known, tmp_path, "other-2c") is None


def test_command_measures_the_real_engine_beside_its_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scheduler_step, "measure_all", lambda: [scheduler_step.measure(4, steps=5)])
    words = [
        "--shape",
        "tiny",
        "--dtype",
        "float32",
        "--rounds",
        "1",
        "--workloads",
        "8x128/64",
        "--host-rows",
    ]
    words += ["--threads", "1", "--out", str(tmp_path / "results"), "--cache", str(tmp_path)]
    assert main(["offline", *words]) == 0
    (kept,) = (tmp_path / "results").glob("*.json")
    result = json.loads(kept.read_text())
    assert result["command"] == " ".join(["python -m benchmarks", *words])
    assert {"cpu", "cores", "memory_gib", "kernels", "threads", "python", "torch"} <= set(
        result["machine"]
    )
    (row,) = result["workloads"]
    assert row["agreement"] == 1.0  # float32: every token is the peer's
    assert row["output_tokens_per_s"]["quire"] > 0
    assert "Machine:" in capsys.readouterr().out


def test_command_measures_a_step(monkeypatch, capsys):
    monkeypatch.setattr(
        scheduler_step, "measure_all", lambda count: [scheduler_step.measure(4, steps=count)]
    )
    assert main(["steps", "--steps", "5"]) == 0
    assert capsys.readouterr().out.startswith("     4 rows")
