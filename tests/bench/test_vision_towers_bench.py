"""The benchmark of vision towers, with towers of a few features."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as laboratory
from benchmarks import vision_towers
from benchmarks.vision_towers import QWEN, SIGLIP, TowerSize

SMALL = TowerSize(64, 96, 2, 2, 64)


def test_both_towers_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vision_towers, "SIZES", {QWEN: SMALL, SIGLIP: SMALL})
    found = {name: vision_towers.measure(vision_towers.pair(name, SMALL, 56), 3, 0) for name in (QWEN, SIGLIP)}  # fmt: skip
    for case in found.values():
        assert case["rounds"] == 3
        assert case["least_cosine"] > 0.995
    assert laboratory.main(["towers", "--sides", "28", "--rounds", "1", "--towers", SIGLIP]) == 0
    assert f"{SIGLIP} 28x28: " in capsys.readouterr().out


def test_the_median_of_the_ratios_counts() -> None:
    took = {"quire": [1.0, 2.0, 1.0], "transformers": [3.0, 2.0, 1.6]}
    got = vision_towers.report(took)
    assert got["times_as_fast"] == 1.6
    assert got["lowest_and_highest"] == [1.0, 3.0]
    assert got["aim_met"]
