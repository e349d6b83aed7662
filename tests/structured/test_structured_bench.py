"""The benchmark of constrained output runs, on a tiny model, and its sums are right."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.structured_outputs import Measured


def test_sums():
    report = Measured([0.1, 0.2, 0.3], [0.2, 0.25, 0.3], [0.01] * 3, [0.03, 0.02, 0.9]).report()
    assert report["step_ms_free"] == 200
    assert report["step_ms_constrained"] == 250
    assert report["speed"] == 0.8  # the median round, not the quotient of medians
    assert report["first_token_ms_added"] == 20
    assert report["goals_met"] == {"speed": False, "first_token": True}


def test_a_run(capsys: pytest.CaptureFixture[str]):
    words = "structured --shape tiny --dtype float32 --rows 4 --rounds 1 --output 8".split()
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 4
    assert found["step_ms_constrained"] > 0
