"""constraints.txt: versions of all that is installed, inside the ranges of pyproject.toml, for each supported Python."""

from __future__ import annotations

import importlib.metadata
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_rules import ROOT

from tools.constraints import PYTHONS, lower_ends, merged, requirements

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = [Requirement(line) for line in LINES if not line.startswith("#")]


def pins(python: str) -> dict[str, str]:
    """Name -> version, for one Python."""
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in PINS
        if pin.marker is None or pin.marker.evaluate({"python_version": python})
    }


def wrong_pins(python: str, wanted: list[str]) -> list[str]:
    """The requirements without a version that fits."""
    have = pins(python)
    return [
        line
        for line in wanted
        if not (needed := Requirement(line)).specifier.contains(
            have.get(canonicalize_name(needed.name), "0")
        )
    ]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_dependency_has_a_version_that_pyproject_allows(python: str):
    wanted = requirements(PROJECT, torch=False)
    assert not wrong_pins(python, wanted), "run: make constraints"
    assert wrong_pins(python, [*wanted, "numpy<1", "left-pad>=1"]) == ["numpy<1", "left-pad>=1"]


def test_the_pythons_are_the_supported_ones():
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]},<3.{int(PYTHONS[-1][2:]) + 1}"


def test_what_the_dependencies_need_has_a_version_too():
    """Everything that is below Quire's own requirements in this environment."""
    have, left, seen = pins(PYTHONS[0]), requirements(PROJECT, torch=False), set()
    while left:
        needed = Requirement(left.pop())
        name = canonicalize_name(needed.name)
        if name in seen or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        left += importlib.metadata.requires(name) or []
    assert len(seen) > 60
    assert {name for name in seen - have.keys() if not name.startswith(("torch", "nvidia-", "cuda-"))} == set()  # fmt: skip


def test_lower_ends():
    lines = ["a>=1.2,<2", "b==3.6.0; sys_platform == 'linux'", "types-c", "d>=2.9", "d>=2.10"]
    assert lower_ends(lines) == ["a==1.2", "b==3.6.0; sys_platform == 'linux'", "d==2.10"]


def test_versions_that_differ_name_their_pythons():
    by_python = {
        "3.11": {"a": "1", "b": "2", "torch": "9"},
        "3.12": {"a": "1", "b": "3"},
        "3.13": {"b": "3"},
    }
    both = 'python_version == "3.12" or python_version == "3.13"'
    assert merged(by_python) == ["a==1", 'b==2; python_version == "3.11"', f"b==3; {both}"]
