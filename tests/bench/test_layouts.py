"""`python -m benchmarks layouts`: the formulas, and what they read off a model, against numbers by hand and real runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_llama import make_checkpoint

from benchmarks.__main__ import main
from benchmarks.layouts.costs import (
    LINKS,
    Cluster,
    DeviceSpeed,
    LayoutModel,
    LinkSpeed,
    ParallelLayout,
    PartCosts,
    PlannedLoad,
    gather_s,
    layouts,
    plan,
    send_s,
)
from benchmarks.layouts.part_costs import part_costs
from quire.config.engine import EngineConfig, Resolved
from quire.engine.resolve import resolve_config
from quire.parallel.ranks import split_among
from tests.models.cases import CASES, write
from tests.models.harness import Runner
from tests.models.test_native import build
from tests.parallel.thread_ranks import ThreadRanks, on_ranks

FREE = LinkSpeed(0.0, 1e30)
DEVICE = DeviceSpeed(1e12, 1e9, 1e9)
PART = PartCosts(
    tensor=1, num_layers=4, weights=100e6, item=2.0, ends=20e6, end=10e6, dense=40_000_000, head=5_000_000,
    experts=0, chosen=0.0, kv=1000, attention=100, inner_widths=(), drawn_widths=(), hidden=64,
)  # fmt: skip
LOAD = PlannedLoad(requests=8, input_len=100, output_len=10, chunk=512)


def cluster(link: LinkSpeed = FREE, per_machine: int = 64) -> Cluster:
    return Cluster(DEVICE, link, link, per_machine)


@pytest.mark.parametrize(
    ("name", "decode_ms", "chunk_ms"),
    [("nvlink", 0.13, 2.4), ("infiniband", 0.32, 21.5), ("ethernet", 3.2, 86.0), ("internet", 960.0, 86e3)],
)  # fmt: skip
def test_links_give_the_published_times(name: str, decode_ms: float, chunk_ms: float):
    """Llama 3.1 8B on two devices: 64 exchanges of a decode step, latency alone; and 1 GiB of a chunk of 2,048 tokens.

    The numbers are of all-reduces, each of which takes two gathers.
    """
    latency, bandwidth = LINKS[name]
    assert 64 * latency * 1e3 == pytest.approx(decode_ms, rel=0.02)
    assert 128 * gather_s(LinkSpeed(0.0, bandwidth), 2, 2048 * 8192) * 1e3 == pytest.approx(
        chunk_ms, rel=0.02
    )


def test_shared_memory_and_gloo_are_as_measured():
    for name, small, large in (("shared-memory", 0.028e-3, 0.65e-3), ("gloo", 0.23e-3, 30.7e-3)):
        assert send_s(LINKS[name], 64 << 10) == pytest.approx(small, rel=0.02)
        assert send_s(LINKS[name], 32 << 20) == pytest.approx(large, rel=0.02)


def test_formulas():
    link = LinkSpeed(3.0, 100.0)
    assert send_s(link, 200) == 3 + 2
    assert gather_s(link, 4, 400) == 3 * 3 + 3 / 4 * 400 / 100
    assert gather_s(link, 1, 400) == 0


def test_layouts_use_all_devices():
    found = list(layouts(12))
    assert all(one.size == 12 for one in found)
    assert len(set(found)) == len(found) == 40
    assert ParallelLayout(1, 3, 2, 2) in found
    assert str(ParallelLayout(2, 1, 1, 4)) == "dp 2 tp 4"


def test_a_stage_has_its_layers_and_passes_hidden_states():
    link = LinkSpeed(1e-3, 1e30)
    alone = LayoutModel(ParallelLayout(), PART, cluster(link))
    staged = LayoutModel(ParallelLayout(pipeline=2), PART, cluster(link))
    assert alone.weights == 100e6
    assert staged.weights == 40e6 + 10e6
    # products of 90e6 bytes of weights at 1e9 bytes/s; the head belongs to one stage, and each counts as that one
    assert alone.decode_step_s(1, 0)[0] == pytest.approx(0.090)
    assert staged.decode_step_s(1, 0)[0] == pytest.approx(2 * (0.050 + 1e-3))


def test_a_pipeline_needs_requests_for_its_stages():
    """With as many requests as stages, each stage is busy: the time for a token of each is the time of one request."""
    staged = LayoutModel(ParallelLayout(pipeline=2), PART, cluster())
    assert staged.decode_step_s(2, 0)[0] == staged.decode_step_s(1, 0)[0]


def test_prefill_parts_share_a_prompt_and_not_decoding():
    heavy = replace(PART, dense=400_000_000)
    split, whole = (LayoutModel(ParallelLayout(prefill=n), heavy, cluster()) for n in (2, 1))
    assert split.prefill_step_s(512 * 64, 0) < 0.51 * whole.prefill_step_s(512 * 64, 0)
    assert split.decode_step_s(8, 100) == whole.decode_step_s(8, 100)


def test_engines_multiply_throughput_and_what_does_not_fit_comes_last():
    found = plan(2, {1: PART, 2: "no"}, cluster(), LOAD)
    assert [bool(one.reason) for one in found] == [False, False, False, True]
    by_layout = {one.layout: one for one in found}
    both, half = by_layout[ParallelLayout(data=2)], LOAD._replace(requests=4)
    one = LayoutModel(ParallelLayout(), PART, cluster()).costs(half)
    assert both.tokens_per_s == pytest.approx(2 * one.tokens_per_s)
    assert both.requests == 8
    assert [one.tokens_per_s for one in found] == sorted((one.tokens_per_s for one in found), reverse=True)  # fmt: skip
    large = replace(PART, weights=1.2e9)
    refused = plan(2, {1: large, 2: "no"}, cluster(), LOAD)
    fits = {one.layout for one in refused if not one.reason}
    assert fits == {ParallelLayout(pipeline=2)}
    assert all("GB for weights" in one.reason or one.reason == "no" for one in refused if one.reason)  # fmt: skip


def test_memory_limits_the_requests():
    found = LayoutModel(ParallelLayout(), replace(PART, kv=2_000_000), cluster()).costs(LOAD)
    assert found.requests == 3
    assert found.memory <= 0.9 * DEVICE.memory


def test_groups_within_a_machine_use_its_link():
    fast, slow = LinkSpeed(1.0, 1.0), LinkSpeed(2.0, 1.0)
    two_machines = Cluster(DEVICE, fast, slow, 4)
    model = LayoutModel(ParallelLayout(1, 2, 2, 2), PART, two_machines)
    assert (model.tensor_link, model.part_link, model.stage_link) == (fast, fast, slow)


RUNS = ["llama", "llama one kv head", "llama tied", "qwen3 moe", "deepseek v3", "olmo2"]


@pytest.mark.parametrize("name", RUNS)
def test_exchanges_are_those_of_a_run(name: str, tmp_path: Path):
    """Bytes of every exchange of 2 and 4 ranks, counted while they compute 7 tokens, all of which draw."""
    case = next(case for case in CASES if case.name == name)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 128 * 4}
    sizes |= {"moe_intermediate_size": 256} if "moe_intermediate_size" in case.config else {}
    write(replace(case, config={**case.config, **sizes}), tmp_path)
    resolved = checked(tmp_path)

    def run(ranks: ThreadRanks) -> list[int]:
        with split_among(ranks):
            model = build(tmp_path, model_impl="quire")
        Runner(model).prefill(0, [5, 6, 7, 8, 9, 10, 11])
        return ranks.gathered

    for size in (2, 4):
        part = part_costs(resolved, size)
        wanted = sorted(7 * width for width in (*part.inner_widths, *part.drawn_widths))
        for counted in on_ranks(size, run):
            assert sorted(counted) == wanted


def checked(path: Path) -> Resolved:
    return resolve_config(
        EngineConfig.from_keywords(model=str(path), dtype="float32", skip_tokenizer_init=True)
    )


def test_a_part_has_the_bytes_of_its_weights(tmp_path: Path):
    write(next(case for case in CASES if case.name == "llama"), tmp_path)
    resolved = checked(tmp_path)
    part = part_costs(resolved, 1)
    assert part.weights == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) - header(tmp_path)  # fmt: skip
    table = 131 * 48
    attention, mlp = 48 * (4 + 2 + 2 + 4) * 16, 3 * 48 * 72
    assert (part.dense, part.head, part.ends) == (2 * (attention + mlp), table, 2 * table * 4)
    assert (part.kv, part.attention) == (2 * 2 * 2 * 16 * 4, 2 * 4 * 32)


def header(path: Path) -> int:
    """Bytes of the headers of safetensors files."""
    files = [file.read_bytes() for file in path.glob("*.safetensors")]
    return sum(8 + int.from_bytes(text[:8], "little") for text in files)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, file = make_checkpoint(tmp_path), tmp_path / "plan.json"
    words = ["--devices", "8", "--device-kind", "a100", "--link", "5,25", "--input-len", "64", "--output-len", "8"]  # fmt: skip
    assert main(["layouts", str(model), *words, "--output-json", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:2] == ["layout", "tokens/s"]
    found = json.loads(file.read_text())["layouts"]
    speeds = [one["tokens_per_s"] for one in found]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 0
    assert any("8 does not divide 4 attention heads" in line for line in printed)
    with pytest.raises(SystemExit):
        main(["layouts", str(model), "--devices", "0"])
    assert main(["layouts", str(model), "--link", "fast"]) == 1
    assert "--link fast: choose from nvlink" in capsys.readouterr().err
