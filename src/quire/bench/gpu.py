"""One call on a machine with a GPU: check everything, then time it. `make bench-gpu`, at most ten minutes.

Knows the order of the sections and what is left of the time. A section that fails says so and the others run; what is
known so far is on disk after each. Nothing here has run on a card yet.

    machine     versions; the card's own ceilings: copy bandwidth and the rate of a bf16 product
    kernels     every kernel against its definition (`gpu_checks.py`)
    engine      tokens on the card against those of the CPU; depth 1 and 2, graphs and none
    figures     kernels and whole steps at real shapes, with the floor beside each (`gpu_figures.py`)
    serving     many requests at once, and a mixed load at a fixed rate
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Section = Callable[["Run"], dict[str, Any]]


class Run:
    """What sections share: the device, the time that is left, and whether shapes are real or tiny."""

    def __init__(self, device: str, seconds: float, small: bool):
        self.device, self.small = device, small
        self.ends = time.monotonic() + seconds
        self.ceilings: dict[str, float] = {}

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()


def machine(run: Run) -> dict[str, Any]:
    """Versions and ceilings."""
    import torch
    import triton

    from quire.bench.gpu_figures import timed

    found: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    if run.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= {"card": card.name, "processors": card.multi_processor_count, "memory": card.total_memory}  # fmt: skip
    size, wide = (1 << 20, 256) if run.small else (4 << 30, 8192)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    run.ceilings["bytes"] = 2 * size / timed(run, lambda: target.copy_(source))
    a, b = (torch.randn(wide, wide, device=run.device).bfloat16() for _ in range(2))
    run.ceilings["flops"] = 2 * wide**3 / timed(run, lambda: a @ b)
    return {**found, "copy_bytes_per_second": run.ceilings["bytes"], "bf16_flops": run.ceilings["flops"]}  # fmt: skip


def sections() -> dict[str, Section]:
    from quire.bench import gpu_checks, gpu_figures

    return {
        "machine": machine,
        "kernels": gpu_checks.kernels,
        "engine": gpu_checks.engine,
        "figures": gpu_figures.kernels,
        "steps": gpu_figures.steps,
        "serving": gpu_figures.serving,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="quire bench gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: only to try the sections out")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--small", action="store_true", help="tiny shapes: to try the sections out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", nargs="*", help="names of sections; unset: all")
    asked = parser.parse_args(argv)
    run = Run(asked.device, asked.seconds, asked.small)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{time.strftime('%Y-%m-%d')}-gpu.json"
    found: dict[str, Any] = {}
    for name, section in sections().items():
        if asked.only and name not in asked.only:
            continue
        began = time.monotonic()
        if run.left < 20:
            found[name] = {"skipped": "no time left"}
        else:
            try:
                found[name] = section(run)
            except Exception as error:
                traceback.print_exc()
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        found[name]["seconds"] = round(time.monotonic() - began, 1)
        path.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
        print(f"== {name}\n{json.dumps(found[name], indent=1, default=str)}", flush=True)
    bad = [name for name, part in found.items() if "failed" in part or part.get("wrong")]
    print(f"{path}: {'all well' if not bad else 'see ' + ', '.join(bad)}")
    return 1 if bad else 0
