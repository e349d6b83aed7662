"""Decoding alone and beside a busy process: each engine has a row, and a peer that is not installed has the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import neighbour
from benchmarks.__main__ import main


@pytest.mark.slow
def test_every_engine_has_rows_or_a_reason(tmp_path: Path, capsys) -> None:
    words = [
        "neighbour",
        "--shape",
        "tiny",
        "--requests",
        "1",
        "2",
        "--output",
        "4",
        "--rounds",
        "1",
    ]
    words += ["--engines", "quire", "quire-served", "openvino", "--cache", str(tmp_path), "--peers", str(tmp_path), "--out", str(tmp_path)]  # fmt: skip
    assert main(words) == 0
    (file,) = tmp_path.glob("*-neighbour-tiny-*.json")
    kept = json.loads(file.read_text())
    assert kept["command"].endswith(" ".join(words))
    for name in ("quire", "quire-served"):
        seconds = kept["engines"][name]["seconds"]
        assert {rows: {key: len(times) for key, times in each.items()} for rows, each in seconds.items()} == {
            "1": {"alone": 1, "beside": 1}, "2": {"alone": 1, "beside": 1},
        }  # fmt: skip
    assert "install.py openvino" in kept["engines"]["openvino"]["failed"]
    assert "| openvino | | | | openvino: no " in capsys.readouterr().out


def test_a_folder_without_cgroups_is_refused(tmp_path: Path, capsys) -> None:
    words = ["neighbour", "--shape", "tiny", "--groups", str(tmp_path), "--cache", str(tmp_path)]
    assert main(words) == 2
    assert (
        "work/cgroup.procs is not writable; make two cgroups, work and busy, in it"
        in capsys.readouterr().err
    )


def test_the_table_compares_medians() -> None:
    seconds = {1: {"alone": [1.0, 2.0, 9.0], "beside": [3.0, 4.0, 5.0]}}
    table = neighbour.table(
        {"engines": {"quire": {"seconds": seconds}, "b": {"failed": "why\nmore"}}}
    )
    assert "| quire | 1 | 2.00 | 4.00 | 2.00x |" in table
    assert "| b | | | | why |" in table
