"""`make wheel`: the wheels of Quire and of its `vllm` package, in one folder.

    sources --pip wheel--> py3-none-linux_x86_64 --auditwheel--> py3-none-manylinux_2_34_x86_64

auditwheel reads which symbols the kernels take from glibc, and names the oldest Linux that has them. The kernels share
OpenMP's threads with torch, so the wheel must not have a libgomp of its own: torch brings it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ("libgomp.so.1",)  # libraries that the process has already


def find_programs() -> None:
    """Find what the last step needs before the first one compiles for minutes.

    Raises:
        SystemExit: a program is missing.
    """
    programs = str(
        Path(sys.executable).parent
    )  # an environment that is not activated is not in PATH
    os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    for name in ("auditwheel", "patchelf"):
        if sys.platform == "linux" and shutil.which(name) is None:
            raise SystemExit(f"{name} is not in PATH, and the wheel needs it: {sys.executable} -m pip install {name}")  # fmt: skip


def run(*command: str | Path) -> None:
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True)


def build(source: Path, into: Path) -> Path:
    """Build one wheel, with pip."""
    before = set(into.glob("*.whl"))
    run("pip", "--disable-pip-version-check", "wheel", "--no-deps", "--wheel-dir", into, source)
    [wheel] = set(into.glob("*.whl")) - before
    return wheel


def has_kernels(wheel: Path) -> bool:
    """Whether the wheel is for one architecture: a machine without a compiler builds one without kernels."""
    return not wheel.name.endswith("-any.whl")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Build the wheels of Quire.")
    parser.add_argument("folder", type=Path, help="folder for the wheels")
    folder: Path = parser.parse_args(arguments).folder
    find_programs()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        wheels = [build(ROOT, Path(name)), build(ROOT / "compat" / "vllm", Path(name))]
        for wheel in wheels:
            if has_kernels(wheel) and sys.platform == "linux":
                excluded = (f"--exclude={library}" for library in SHARED)
                run("auditwheel", "repair", "--wheel-dir", folder, *excluded, wheel)
            else:
                wheel.replace(folder / wheel.name)
    if not has_kernels(wheels[0]):
        print(
            "There was no C++ compiler, so the wheel has no kernels: they are compiled where Quire"
            " first runs. Install g++ and run this again for a wheel that needs no compiler.",
            file=sys.stderr,
        )
    print("Install it with:\n  pip install", *sorted(map(str, folder.glob("quire-*.whl"))))


if __name__ == "__main__":
    main()
