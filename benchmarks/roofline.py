"""Description of the machine, probes of its memory bandwidth and matrix speed, and the roofline time of a workload.

The probes run in the measuring process, around each round, because the speed of a shared machine changes by the minute.
"""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.shapes import Shape, Workload
from quire.platforms import detect


@dataclass(frozen=True, slots=True)
class Probe:
    """The machine's speed at the moment of the probe."""

    bytes_per_s: float  # reading
    flops_per_s: float  # matrix product in the model's dtype or in float32, the faster one


def probe(dtype: str) -> Probe:
    """Takes about a second: the best of several reads of 256 MiB, and of several matrix products of 1,536 cubed.

    Without bf16 instructions torch's bf16 products run at a fraction of the machine's float32 speed: that would be no floor.
    """
    import numpy
    import torch

    # NumPy requests huge pages; with small pages, memory seems slower than it is.
    source = torch.from_numpy(numpy.ones(64 << 20, dtype=numpy.float32))
    reads = [_seconds(source.sum) for _ in range(6)]
    side = 1536
    squares = [
        torch.ones(side, side, dtype=each) for each in {getattr(torch, dtype), torch.float32}
    ]
    products = [
        _seconds(partial(torch.nn.functional.linear, a, a)) for a in squares for _ in range(6)
    ]
    return Probe(source.nbytes / min(reads), 2 * side**3 / min(products))


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of the probed speed that each part of the work should reach."""

    stream: float  # weights, when few rows use them
    kv: float  # keys and values
    product: float  # large matrix products
    attention: float  # scores and their products in a prompt


FLOOR = Shares(1.0, 1.0, 1.0, 1.0)
# The expectation for plain torch: with few rows its linear layers read weights at half the bandwidth; gathering KV and
# attending over it moves 2 of 40 GB/s; attention over a prompt reaches 0.1 of 1 TFLOP/s.
PREDICTED = Shares(0.55, 0.05, 0.85, 0.12)


def seconds(
    shape: Shape,
    workload: Workload,
    itemsize: float,
    machine: Probe,
    share: Shares,
    kv_itemsize: float | None = None,
) -> float:
    """The time of a workload if every part runs at its share of the probed speed.

    A step takes the longer of reading its weights and multiplying by them, plus the time of attention and of recurrent
    states: over a prompt each token updates and reads each element of a state, 4 operations, in matrix products at best.

    Args:
        itemsize: bytes of a weight, and of an element of the KV cache if `kv_itemsize` is unset.
    """
    kv_itemsize = itemsize if kv_itemsize is None else kv_itemsize
    rows, prompt = workload.rows, workload.prompt
    stream, product = machine.bytes_per_s * share.stream, machine.flops_per_s * share.product
    attend = machine.flops_per_s * share.attention
    tokens = rows * prompt
    read = (shape.read_parameters(tokens) + shape.head_parameters) * itemsize / stream
    flops = 2 * (shape.used_parameters * tokens + shape.head_parameters * rows)
    scores = 2 * shape.attention_layers * shape.heads * shape.head_dim * prompt * prompt * rows
    states = 4 * shape.state_elements * tokens
    total = max(read, flops / product) + (scores + states) / attend
    state = rows * shape.state_elements * 8 / machine.bytes_per_s  # float32, read and written
    read = (shape.read_parameters(rows) + shape.head_parameters) * itemsize / stream + state
    flops = 2 * (shape.used_parameters + shape.head_parameters) * rows
    for step in range(1, workload.output):
        kv = rows * (prompt + step) * shape.kv_elements * kv_itemsize
        total += max(read, flops / product) + kv / (machine.bytes_per_s * share.kv)
    return total


def describe() -> dict[str, Any]:
    """CPU, cores, memory, threads and versions: every result needs them."""
    import torch
    import transformers

    from quire.ops.cpu import bindings

    kernels = bindings.best()
    return {
        "cpu": detect.cpu_name(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(detect.memory()[0] / 2**30, 1),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": kernels.isa.name if kernels else "plain torch",
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def slug(machine: dict[str, Any]) -> str:
    """A part of a file name: the CPU and its number of cores."""
    words = re.sub(r"\((r|tm)\)|cpu|processor|@.*", " ", machine["cpu"].lower())
    return "-".join([*re.findall(r"[a-z0-9]+", words), f"{machine['cores']}c"])
