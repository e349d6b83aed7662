"""`quire collect-env`: versions, machine, memory and variables, as text to paste into a bug report.

Hides keys and tokens. Works in a broken installation: it reports what it could not find out.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from quire import env
from quire.version import __version__

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "msgspec", "pyzmq", "starlette", "uvicorn", "uvloop",
    "vllm",
)  # fmt: skip
OUTER = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "PROMETHEUS_MULTIPROC_DIR", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "LD_PRELOAD",
)  # fmt: skip
GIB = 1 << 30


def main(argv: Sequence[str]) -> int:
    """Print the report."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    print(report(), end="")
    return 0


def report() -> str:
    """The report as text, one `name: value` per line, in three parts."""
    parts = {"Versions": versions, "Machine": machine, "Environment": environment}
    lines = []
    for title, rows in parts.items():
        lines.append(title)
        lines += [f"  {name:<18} {value}" for name, value in _safely(rows)]
        lines.append("")
    return "\n".join(lines)


def _safely(rows: Callable[[], list[tuple[str, str]]]) -> list[tuple[str, str]]:
    try:
        return rows()
    except Exception as why:  # a broken machine must not break the report
        return [("?", f"{type(why).__name__}: {why}")]


def versions() -> list[tuple[str, str]]:
    found = [("quire", __version__), ("python", sys.version.split()[0])]
    for name in PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                found.append((name, "not installed"))
    return found


def machine() -> list[tuple[str, str]]:
    from quire.platforms.detect import cpu_flags, cuda_device, cuda_missing, facts

    here = facts()
    kept = [
        f
        for f in sorted(cpu_flags())
        if f.startswith(("avx", "amx", "asimd", "sve", "bf16", "f16c", "fma"))
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = [
        ("system", platform.platform()),
        ("device", f"{here.device}: {here.name}"),
        ("dtypes", ", ".join(here.dtypes)),
        ("cores", f"{cores} for this process, of {os.cpu_count()}"),
        ("instructions", " ".join(kept)),
        (
            "memory",
            f"{here.available_bytes / GIB:.1f} GiB available of {here.total_bytes / GIB:.1f}",
        ),
        ("compiler", compiler()),
    ]
    if (gpu := cuda_device()) is not None:
        major, minor = gpu.capability
        used = cuda_missing() or ("used" if here.device == "cuda" else "not used (QUIRE_DEVICE)")
        rows.append(
            ("cuda", f"{gpu.name}, {gpu.total / GIB:.1f} GiB, compute {major}.{minor}: {used}")
        )
    return rows


def compiler() -> str:
    path = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if path is None:
        return "none"
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=10, check=False
    )
    return (done.stdout.splitlines() or [path])[0]


def environment() -> list[tuple[str, str]]:
    rows = list(env.own_variables().items())
    rows += [(name, value) for name in OUTER if (value := env.outer(name)) is not None]
    if env.outer("HF_TOKEN"):
        rows.append(("HF_TOKEN", "***"))
    return rows or [("", "no variables set")]
