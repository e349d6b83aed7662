"""`python -m benchmarks kept` with the embedded model: every section measures, and answers are equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as laboratory

WORDS = [
    "kept", "--model", "quire-tiny", "--prompt", "200", "--rows", "4", "--swap-lengths", "64", "96", "--steps", "6", "--rounds", "1",
]  # fmt: skip


@pytest.mark.parametrize(
    "sections",
    [["restart", "swap", "unused"], pytest.param(["crash"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_every_section(
    sections: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "--folder", str(tmp_path / "kv"), "--out", str(tmp_path), "--only", *sections]
    assert laboratory.main(words) == 0
    (file,) = tmp_path.glob("*-kept-*.json")
    found = json.loads(file.read_text())["sections"]
    assert list(found) == sections
    printed = capsys.readouterr().out
    if "restart" in found:
        assert found["restart"]["loaded_tokens"] >= 160
        assert found["restart"]["disk"]["store"][0] > 0
        assert found["swap"]["preemptions"]["swap"] > 0
        assert "Tokens are equal: True." in printed
        assert list(found["unused"]["ms"]) == ["off", "second-use", "auto"]
    else:
        assert 0 < found["crash"]["seconds"]["first token"][0] <= found["crash"]["seconds"]["last stream"][0]  # fmt: skip
    assert printed.count("\n| ") > len(sections)
