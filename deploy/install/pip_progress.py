"""Run `pip install` and show one line about it instead of its output, which goes into a file.

    python deploy/install/pip_progress.py LOG ARGUMENT ...

A terminal shows one line that changes; elsewhere one line at the end says what was done. If pip fails, its last lines are printed.
Needs only the standard library: it runs in a .venv where nothing is installed yet.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

TAIL = 30  # lines of pip's output that a failure shows
STEP = re.compile(r"(?:Collecting|Downloading|Building|Installing|Preparing|Using cached)\b.*")


def short(line: str) -> str:
    """One of pip's lines as a step of the work: without addresses and folders."""
    if line.startswith("Installing collected packages"):
        return f"unpacking {line.count(',') + 1} packages"
    words = [word.rsplit("/", 1)[-1] for word in line.strip().split()]
    return " ".join(words)[:60]


def run(log: Path, arguments: list[str]) -> int:
    """pip's exit status."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--progress-bar", "off", *arguments]
    output: queue.Queue[str | None] = queue.Queue()
    lines: list[str] = []
    began, step, shows = time.monotonic(), "looking for packages", sys.stdout.isatty()
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child,
    ):
        threading.Thread(target=read, args=(child, output), daemon=True).start()
        while True:
            if shows:
                seconds = time.monotonic() - began
                print(f"\r\033[K  {seconds:3.0f} s  {step}", end="", flush=True)
            try:
                line = output.get(timeout=1)
            except queue.Empty:
                continue
            if line is None:
                break
            lines.append(line)
            file.write(line)
            if STEP.match(line.strip()):
                step = short(line)
    if shows:
        print("\r\033[K", end="")
    seconds = time.monotonic() - began
    if child.returncode:
        print("".join(lines[-TAIL:]), f"pip failed after {seconds:.0f} s; all of its output: {log}", sep="", file=sys.stderr)  # fmt: skip
    else:
        print(f"  installed in {seconds:.0f} s")
    return child.returncode


def read(child: subprocess.Popen[str], output: queue.Queue[str | None]) -> None:
    """Pass on each line; None after the last one."""
    assert child.stdout is not None
    for line in child.stdout:
        output.put(line)
    output.put(None)


if __name__ == "__main__":
    raise SystemExit(run(Path(sys.argv[1]), sys.argv[2:]))
