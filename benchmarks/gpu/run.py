"""`python -m benchmarks gpu` and `make bench-gpu`: check everything on a GPU, then time it.

A call takes at most ten minutes; the next call continues. Each section is a process, so a section that fails, hangs or
loses the device does not affect the others. The result file has each figure as soon as it is known. A section starts
only if its time fits the rest of the call. A call skips sections that the result file already has, unless `--only`
names them or they failed (these run last). Two or three calls of nine minutes complete the file. Not yet run on a GPU.

    machine     versions; the GPU's ceilings: copy bandwidth, rates of bf16, fp8 and int8 matrix products
    kernels     every kernel against its definition (`checks.py`)
    engine      tokens on the GPU against those on the CPU: depth 1 and 2, with and without graphs, offloaded weights
    steps       the 8B shape: start-up, prefill, decode, a mixed load (`engine.py`); steps-fp8: the same in fp8
    serving     256 requests at once, with the 0.6B shape; peer-*: the same load on peers (`peers.py`)
    figures     kernels at real shapes, with their floors (`kernels.py`); products: fp8, int8 and WNA16 GEMM
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire import env

SECTIONS = {
    "machine": ("run", "machine", 50),
    "kernels": ("checks", "kernels", 130),
    "engine": ("checks", "engine", 100),
    "steps": ("engine", "steps", 150),
    "serving": ("engine", "serving", 90),
    "steps-fp8": ("engine", "steps_fp8", 140),
    "figures": ("kernels", "kernels", 110),
    "products": ("kernels", "products", 90),
    "peer-loop": ("peers", "loop", 60),
    "peer-transformers": ("peers", "transformers", 60),
    "peer-vllm": ("peers", "vllm", 150),
}
"""Name -> module, function, time limit in seconds; the most important first."""
GRACE = 5.0  # seconds beyond its limit until a section is killed
DAY = 86400


class Found(dict[str, Any]):
    """The findings of a section, saved after each change. `known`: start from the content of the file."""

    def __init__(self, path: Path, known: bool = False):
        super().__init__(json.loads(path.read_text(encoding="utf-8")) if known else {})
        self.path = path

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.save()

    def save(self) -> None:
        """Replace the file atomically: the process may be killed at any moment."""
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(self, indent=1, default=str) + "\n", encoding="utf-8")
        new.replace(self.path)


class Run:
    """The shared state of sections: the device, the time left, and whether shapes are real or tiny."""

    def __init__(self, device: str, seconds: float, small: bool, began: float | None = None):
        self.device, self.small = device, small
        self.began = time.time() if began is None else began  # start of the process
        self.ends = time.monotonic() + seconds
        self.ceilings: dict[str, float] = {}

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()


def machine(run: Run, found: Found) -> None:
    """Versions and ceilings."""
    import torch
    import triton

    from benchmarks.gpu.timing import timed

    found["python"] = platform.python_version()
    found["torch"], found["triton"] = torch.__version__, triton.__version__
    if run.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found["card"], found["memory"] = card.name, card.total_memory
        found["processors"] = card.multi_processor_count
    size, wide = (1 << 20, 256) if run.small else (4 << 30, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=run.device).fill_(7)
    target = torch.empty_like(source)
    found["bytes"] = 2 * size / timed(run, lambda: target.copy_(source))
    a, b = (torch.randn(wide, wide, device=run.device).bfloat16() for _ in range(2))
    found["flops"] = 2 * wide**3 / timed(run, lambda: a @ b)
    try:
        from quire.quantization.fp8 import quantize, scaled_product

        x, w = quantize(a), quantize(b)
        seconds = timed(run, lambda: scaled_product(x, w, None, torch.bfloat16))
        found["fp8 flops"] = 2 * wide**3 / seconds
    except Exception as error:
        found["fp8 flops of torch"] = f"{type(error).__name__}: {error}"[:500]
    try:
        left, right = (part.to(torch.int8) for part in (a, b))
        seconds = timed(run, lambda: torch._int_mm(left, right.t()))
        found["int8 flops"] = 2 * wide**3 / seconds
    except Exception as error:
        found["int8 flops of torch"] = f"{type(error).__name__}: {error}"[:500]
    pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=run.device == "cuda")
    place = torch.empty(size // 4, dtype=torch.uint8, device=run.device)
    seconds = timed(run, lambda: place.copy_(pinned, non_blocking=True))
    found["bytes from the host"] = size / 4 / seconds


def ceilings_of(found: dict[str, Any]) -> dict[str, float]:
    kinds = ("bytes", "flops", "fp8 flops", "int8 flops")
    made = {k: found[k] for k in kinds if isinstance(found.get(k), float)}
    if "flops" in made:
        for kind in kinds[2:]:
            made.setdefault(kind, 2 * made["flops"])
    return made


def section(name: str, run: Run, path: Path) -> dict[str, Any]:
    """Run a section in this process. The findings include a failure."""
    module, function, _ = SECTIONS[name]
    found, began = Found(path), time.monotonic()
    try:
        call: Callable[[Run, Found], None] = getattr(
            importlib.import_module(f"benchmarks.gpu.{module}"), function
        )
        call(run, found)
    except Exception as error:
        traceback.print_exc()
        found["failed"] = f"{type(error).__name__}: {error}"[:2000]
    found["seconds"] = round(time.monotonic() - began, 1)
    return dict(found)


def apart(name: str, run: Run, path: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Run a section in its own process, kill it at its time limit, and return its findings so far."""
    most = min(float(SECTIONS[name][2]), run.left)
    path.unlink(missing_ok=True)
    words = [
        sys.executable,
        "-m",
        "benchmarks",
        "gpu",
        "--device",
        asked.device,
        "--section",
        name,
    ]
    words += ["--file", str(path), "--ceilings", json.dumps(run.ceilings), "--seconds", str(most)]
    words += ["--began", str(time.time()), *(["--small"] if asked.small else [])]
    began, why = time.monotonic(), ""
    with subprocess.Popen(words, start_new_session=True) as child:
        try:
            if child.wait(most + GRACE):
                why = f"it ended with {child.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it was stopped after {most + GRACE:.0f} s"
            os.killpg(child.pid, 9)
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if why:
        found.setdefault("failed", why)
    found["seconds with its start"] = round(time.monotonic() - began, 1)
    return dict(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: only to try the sections out")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--small", action="store_true", help="tiny shapes: to try the sections out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument(
        "--only",
        nargs="*",
        choices=SECTIONS,
        help="names of sections, done again; unset: all that are not well yet",
    )
    parser.add_argument("--inside", action="store_true", help="all sections in this process")
    for name in ("--section", "--file", "--ceilings", "--began"):  # for a section's own process
        parser.add_argument(name, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    # The CPU side of comparisons runs in plain torch, so that no CPU kernels are compiled.
    env.set_outer("QUIRE_CPU_ISA", env.outer("QUIRE_CPU_ISA") or "none")
    run = Run(asked.device, asked.seconds, asked.small, asked.began and float(asked.began))
    if asked.section:
        run.ceilings = json.loads(asked.ceilings)
        section(asked.section, run, Path(asked.file))
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    path = result_file(asked.out)
    whole = Found(path, path.is_file())
    wanted = [name for name in SECTIONS if _wanted(name, whole, asked.only)]
    # Failed sections may fail again, so new ones come first; but `machine` before all, as floors need its ceilings.
    wanted.sort(key=lambda name: name in whole and name != "machine")
    for name in wanted:
        if run.left < SECTIONS[name][2] and name != wanted[0]:
            print(f"== {name}: no time left in this call", flush=True)
            continue
        if name != "machine":
            run.ceilings = ceilings_of(whole.get("machine", {}))
        piece = path.with_suffix(f".{name}.part")
        whole[name] = section(name, run, piece) if asked.inside else apart(name, run, piece, asked)
        piece.unlink(missing_ok=True)
        print(f"== {name}\n{json.dumps(whole[name], indent=1, default=str)}", flush=True)
    missing = [name for name in SECTIONS if name not in whole]
    bad = [name for name, part in whole.items() if not _well(part)]
    verdict = f"see {', '.join(bad)}" if bad else "all well"
    print(f"{path}: {verdict}" + (f"; still to do: {', '.join(missing)}" if missing else ""))
    return 1 if bad else 0


def result_file(folder: Path, now: float | None = None) -> Path:
    """Today's file; or yesterday's if it is incomplete and today has none: calls may continue after midnight."""
    now = time.time() if now is None else now
    today, before = (
        folder / f"{time.strftime('%Y-%m-%d', time.gmtime(at))}-gpu.json" for at in (now, now - DAY)
    )
    if today.is_file() or not before.is_file():
        return today
    whole = json.loads(before.read_text(encoding="utf-8"))
    return before if any(_wanted(name, whole, None) for name in SECTIONS) else today


def _well(part: dict[str, Any]) -> bool:
    return "failed" not in part and not part.get("wrong")


def _wanted(name: str, whole: dict[str, Any], only: Sequence[str] | None) -> bool:
    if only:
        return name in only
    return name not in whole or not _well(whole[name])
