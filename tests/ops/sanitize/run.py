"""Builds every kernel with the address and undefined-behaviour sanitizers, for each instruction set that runs here, and
calls it over generated shapes beside plain loops (`*.cpp` here). No torch.

    python tests/ops/sanitize/run.py [build ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.ops.cpu import build, isa

HERE = Path(__file__).parent
FLAGS = (
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
# A leak check needs ptrace, and the kernels keep their scratch memory until the end.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}


def make(which: isa.Isa, folder: Path) -> Path:
    """The program, with the flags of the build but for the optimisation."""
    command = [build.compiler(), *build.FLAGS, *which.flags, *FLAGS, f"-I{build.SOURCES}"]
    sources = [*build.SOURCES.glob("*.cpp"), *HERE.glob("*.cpp")]
    objects = [folder / f"{source.parent.name}-{source.stem}.o" for source in sources]
    jobs = [
        [*command, "-c", str(source), "-o", str(to)]
        for source, to in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: subprocess.run(job, check=True), jobs))
    program = folder / which.name
    subprocess.run([*command, *map(str, objects), "-o", str(program)], check=True)
    return program


def main(wanted: list[str]) -> int:
    failed = []
    for which in isa.usable():
        if wanted and which.name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            program = make(which, Path(folder))
            print(f"{which.name}: ", end="", flush=True)
            code = subprocess.run([str(program)], env={**os.environ, **OPTIONS}).returncode
        if code == 77:
            continue  # the operating system does not give it
        if code:
            failed.append(which.name)
    if failed:
        print("failed:", ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
