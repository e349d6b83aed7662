"""The pictures of README.md: drawn from the result files, small, and there."""

from __future__ import annotations

import re
from pathlib import Path

from tools import readme_pictures

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_drawings_are_current():
    assert readme_pictures.main(check=True) == 0


def test_the_readme_is_short_and_its_pictures_are_there():
    assert len(README.splitlines()) < 120
    paths = re.findall(r"docs/pictures/[\w.-]+", README)
    assert len(set(paths)) == 5
    for path in paths:
        assert (ROOT / path).stat().st_size < 2_000_000


def test_the_ratios_of_the_text_are_those_of_the_results():
    """ "1.25 to 2.28 times the better peer", over all workloads that both columns of the chart have."""
    result = readme_pictures.json.loads(readme_pictures.RESULT.read_text(encoding="utf-8"))
    workloads = {turn["workload"] for turn in result["turns"]}
    ratios = []
    for group in readme_pictures.GROUPS:
        for workload in workloads:
            here = readme_pictures.speeds(result, group, workload)
            ratios.append(here.pop("quire") / max(here.values()))
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in README
