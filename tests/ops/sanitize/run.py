"""Builds every kernel with the address and undefined-behaviour sanitizers, for each instruction set that runs here, and
calls it over generated shapes beside plain loops (`*.cpp` here). No torch.

    python tests/ops/sanitize/run.py [build ...]
    python tests/ops/sanitize/run.py threads [build ...]     with the thread sanitizer, which sees no tiles
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.ops.cpu import build, isa

HERE = Path(__file__).parent
THREADS = "threads"
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer")
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RACES = ("-fsanitize=thread", "-DQUIRE_LATE_THREADS")
# A leak check needs ptrace, and the kernels keep their scratch memory until the end.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "halt_on_error=1",
    "OMP_NUM_THREADS": "3",
}


def compile_all(sources: Iterable[Path], flags: tuple[str, ...], folder: Path) -> list[str]:
    command = [build.compiler(), *build.FLAGS, *flags, *FLAGS, f"-I{build.SOURCES}"]
    objects = {source: str(folder / f"{source.stem}.o") for source in sources}
    jobs = [[*command, "-c", str(source), "-o", to] for source, to in objects.items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: subprocess.run(job, check=True), jobs))
    return list(objects.values())


def run(which: isa.Isa, checks: list[str], flags: tuple[str, ...], folder: Path) -> int:
    """The program's exit status: 0 if all is well, 77 if the operating system does not give what it needs."""
    folder.mkdir()
    kernels = compile_all(build.SOURCES.glob("*.cpp"), (*which.flags, *flags), folder)
    program = str(folder / which.name)
    command = [build.compiler(), *build.FLAGS, *FLAGS, *flags, *checks, *kernels, "-o", program]
    subprocess.run(command, check=True)
    print(f"{which.name}: ", end="", flush=True)
    # The thread sanitizer of gcc 12 wants addresses where it expects them.
    still = ["setarch", "-R"] if flags is RACES else []
    return subprocess.run([*still, program], env={**os.environ, **OPTIONS}).returncode


def main(wanted: list[str]) -> int:
    flags, sources = MEMORY, list(HERE.glob("*.cpp"))
    if wanted[:1] == [THREADS]:
        flags, wanted = RACES, wanted[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checks = compile_all(sources, flags, folder)  # once: they call kernels, and hold none
        codes = {
            which.name: run(which, checks, flags, folder / which.name)
            for which in isa.usable()
            if not wanted or which.name in wanted
        }
    if failed := [name for name, code in codes.items() if code not in (0, 77)]:
        print("failed:", ", ".join(failed))
    return bool(failed) or not codes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
