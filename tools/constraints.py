"""constraints.txt: the exact version of every package that `make install` and `make install-dev` take.

make constraints                     each supported Python resolves the ranges of pyproject.toml; nothing is installed
python tools/constraints.py oldest   print the lower end of each range instead, for `make test-oldest`

torch is not in the file, for the Makefile names its version; nor is what its CUDA build brings, which torch pins itself.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13")
OMITTED = re.compile(r"torch$|nvidia-|cuda-")
HEADER = """\
# The exact versions that `make install` and `make install-dev` take. Written by `make constraints`; see CONTRIBUTING.md.
"""


def requirements(project: Mapping[str, Any], *, torch: bool) -> list[str]:
    """What Quire needs to run and to be tested, and what pip builds it with."""
    given = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    given += project["project"]["optional-dependencies"]["dev"]
    return [line for line in given if torch or name_of(line) != "torch"]


def name_of(requirement: str) -> str:
    """The package's name, as the index writes it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def lower_ends(lines: list[str]) -> list[str]:
    """`name>=1.2,<2; marker` -> `name==1.2; marker`. A package that is named twice keeps its highest lower end."""
    ends: dict[str, tuple[tuple[int, ...], str]] = {}
    for line in lines:
        least = re.search(r"[>=]=([\d.]+)", line)
        if least is None:
            continue
        marker = line.partition(";")[2].strip()
        pin = f"{name_of(line)}=={least[1]}" + (f"; {marker}" if marker else "")
        ends[name_of(line)] = max(
            ends.get(name_of(line), ((), "")), (tuple(map(int, least[1].split("."))), pin)
        )
    return [pin for _, pin in ends.values()]


def resolved(python: str, wanted: list[str]) -> dict[str, str]:
    """Name -> version, as pip of this Python chooses them.

    Raises:
        SystemExit: the Python is missing or no versions fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        report = Path(folder, "report.json")
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
        subprocess.run(
            [*pip, "--quiet", "--dry-run", "--ignore-installed", "--report", report, *wanted],
            check=True,
        )
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {name_of(package["name"]): package["version"] for package in packages}


def merged(by_python: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The lines of the file: one for each package and version, with a marker for the Python versions that resolve to it."""
    lines = []
    for name in sorted({name for versions in by_python.values() for name in versions}):
        if OMITTED.match(name):
            continue
        pythons: dict[str, list[str]] = {}
        for python, versions in by_python.items():
            if name in versions:
                pythons.setdefault(versions[name].partition("+")[0], []).append(python)
        for version, takers in pythons.items():
            marker = " or ".join(f'python_version == "{python}"' for python in takers)
            lines.append(f"{name}=={version}" + (f"; {marker}" if len(pythons) > 1 else ""))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("write", "oldest"))
    parser.add_argument("--torch", default="torch", help="the requirement that the Makefile names")
    parser.add_argument("--pythons", nargs="+", default=[f"python{python}" for python in PYTHONS])
    given = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if given.what == "oldest":
        print("\n".join(lower_ends(requirements(project, torch=True))))
        return
    wanted = [given.torch, *requirements(project, torch=False)]
    by_python = {}
    for version, python in zip(PYTHONS, given.pythons, strict=True):
        print(f"resolving for Python {version}", flush=True)
        by_python[version] = resolved(python, wanted)
    FILE.write_text(HEADER + "\n".join(merged(by_python)) + "\n", encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}: run `make test` before you commit it")


if __name__ == "__main__":
    main()
