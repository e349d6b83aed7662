"""`--plot`: what the pictures show equals the measured numbers, and the files are pictures."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from scripted_server import model
from test_serve import bench

from quire.bench import plot
from quire.bench.__main__ import main
from quire.errors import ConfigError

pytest.importorskip("matplotlib", reason="the pictures of benchmarks need matplotlib")
SPANS = [plot.RequestSpan(0.0, 0.2, 1.2, 11), plot.RequestSpan(0.5, 1.0, 2.0, 21), plot.RequestSpan(0.6, 1.0, 1.0, 1)]  # fmt: skip


def result(server: dict[str, Any], clients: int, ttft: float, speed: float) -> dict[str, Any]:
    return {"serve": server, "bench": {"max_concurrency": clients}, "completed": 8, "median_ttft_ms": ttft, "median_tpot_ms": ttft / 10, "output_throughput": speed}  # fmt: skip


RESULTS = [result({"max_num_seqs": n}, clients, 10.0 * clients + run, 50.0 * clients) for n in (1, 2) for clients in (1, 4) for run in (0, 1, 9)]  # fmt: skip


def shown(path: Path) -> str:
    """The SVG's text, after both files were found to be pictures of the size for slides."""
    png, svg = plot.files(path)
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (2200, 920)
    text = svg.read_text(encoding="utf-8")
    assert text.rstrip().endswith("</svg>")
    return text


def test_the_points_are_the_medians_of_the_runs():
    one = [each for each in RESULTS if each["serve"] == {"max_num_seqs": 2}]
    assert plot._points(one, "median_ttft_ms") == [
        (11.0, 50.0, "max concurrency 1"),
        (41.0, 200.0, "max concurrency 4"),
    ]
    one[0].pop("median_ttft_ms")  # a run without it is left out
    assert plot._points(one, "median_ttft_ms")[0][0] == 15.0
    one[0]["median_ttft_ms"] = 10.0


def test_a_sweep_has_a_line_for_each_server(tmp_path: Path):
    plot.sweep(RESULTS, tmp_path / "sweep")
    text = shown(tmp_path / "sweep")
    for words in ("max num seqs 1", "max num seqs 2", "at each point: max concurrency", ">4<", "Time to first token, median (ms)"):  # fmt: skip
        assert words in text
    plot.sweep([RESULTS[0] | {"serve": {"_benchmark_name": "int8"}}], tmp_path / "one.svg")
    assert "int8" not in shown(tmp_path / "one.svg"), "one server needs no legend"


def test_a_load_names_its_median_and_99th_percentile(tmp_path: Path):
    plot.load(SPANS, tmp_path / "load.png", "3 requests")
    text = shown(tmp_path / "load.png")
    middle, late = numpy.percentile([200, 500, 400], (50, 99))
    assert f"time to first token: median {middle:.3g} ms, p99 {late:.3g} ms" in text
    assert "time per output token: median 75 ms, p99 99.5 ms" in text  # 100 and 50 ms
    assert "mean 16.5" in text  # 33 tokens in 2 s


def test_no_token_is_lost_in_the_rate():
    drawn: dict[str, Any] = {}

    def keep(values: Any, edges: Any, **_: Any) -> None:
        drawn.update(values=values, edges=edges)

    def ignore(*_: Any, **__: Any) -> None:
        return None

    panel = SimpleNamespace(stairs=keep, axhline=ignore, annotate=ignore, set=ignore)
    plot._rate(panel, SPANS)
    assert float((drawn["values"] * numpy.diff(drawn["edges"])).sum()) == pytest.approx(33)
    plot._rate(panel, [])
    assert not drawn["values"].any()


def test_a_batch_counts_its_requests(tmp_path: Path):
    plot.batch(SPANS, tmp_path / "batch", "3 requests")
    text = shown(tmp_path / "batch")
    assert "finished" in text
    assert "running" in text


def test_what_is_missing_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # fmt: skip
    with pytest.raises(ConfigError, match=r"folder .*nowhere does not exist"):
        plot.check(tmp_path / "nowhere/a")
    plot.check(tmp_path / "a")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    plot.check(None)
    for words in (["serve"], ["sweep", "serve", "--serve-cmd", "a", "--bench-cmd", "b"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--plot", str(tmp_path / "a")])
        assert ended.value.code == 2
        assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
    assert main(["throughput", "--plot", "a"]) == 1
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_a_load_is_drawn(tmp_path: Path):
    status, _ = bench(model, "--num-prompts", "3", "--random-input-len", "4", "--disable-tqdm", "--plot", str(tmp_path / "p"))  # fmt: skip
    assert status == 0
    assert "3 requests to m/toy" in shown(tmp_path / "p")


def test_a_batch_is_drawn(tmp_path: Path):
    words = ["quire-tiny", "--num-prompts", "3", "--input-len", "4", "--output-len", "4", "--kv-cache-memory-bytes", "16M"]  # fmt: skip
    kept = tmp_path / "a.json"
    assert (
        main(["throughput", *words, "--plot", str(tmp_path / "p"), "--output-json", str(kept)]) == 0
    )
    speed = json.loads(kept.read_text())["tokens_per_second"]
    assert f"3 requests, {speed:.4g} tokens per second" in shown(tmp_path / "p")
