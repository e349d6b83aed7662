"""`python -m benchmarks ranks`: what the exchange of ranks costs, and the host's part of a step of two ranks.

The exchange, in two processes with one thread each, beside gloo of torch:

    gather        each rank has a part of N bytes, and gets all N: what a layer of Quire does
    all-reduce    each rank has N bytes, and gets the sum over ranks: what a layer does where sums cross ranks. Quire's: each rank
                  gathers all and adds them in the order of the ranks

The step: medians of decode steps of a whole engine, with one process and with two ranks. "host" is the CPU time of the engine's
thread, which plans, sends the plan to both and receives: the workers are processes in both cases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks import shapes

BYTES = (8 << 10, 16 << 20)
SIZE = 2
PROMPT, WARM = 16, 5


def exchanges(numbers: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """Microseconds of an exchange, the median and the least, by "what, bytes"."""
    from quire.parallel.layout import RankLayout
    from quire.parallel.rank_address import addresses

    asked = json.dumps([list(numbers), repeats])
    with tempfile.TemporaryDirectory() as folder, addresses(RankLayout(tensor=SIZE)) as found:
        command = [sys.executable, "-m", "benchmarks.ranks", asked, folder]
        children = [
            subprocess.Popen(
                [*command, msgspec.json.encode(each).decode()],
                pass_fds=[each.fd],
                stdout=subprocess.PIPE,
            )
            for each in found
        ]
        try:
            texts = [child.communicate(timeout=600)[0] for child in children]
        finally:
            for child in children:
                child.kill()
    measured: dict[str, list[float]] = json.loads(texts[0])
    return measured


def rank(asked: str, folder: str, address_text: str) -> None:
    """Measure as one of the ranks, and print the results."""
    import torch
    from torch import distributed

    from quire.parallel.rank_address import RankAddress

    numbers, repeats = json.loads(asked)
    torch.set_num_threads(1)
    address = msgspec.json.decode(address_text, type=RankAddress)
    ranks: Any = address.join().tensor
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=address.rank, world_size=SIZE
    )
    found = {}
    for number in numbers:
        own = torch.ones(1, number // 4)
        part = own[:, : number // 4 // SIZE].contiguous()
        parts = [torch.empty_like(part) for _ in range(SIZE)]
        ways: dict[str, Callable[[], Any]] = {
            "gather": partial(ranks.gather, rows_of(part)),
            "gather, gloo": partial(distributed.all_gather, parts, part),
            "all-reduce": partial(added, ranks, rows_of(own)),
            "all-reduce, gloo": partial(distributed.all_reduce, own),
        }
        count = max(5, repeats * BYTES[0] // max(number, BYTES[0]))
        for name, way in ways.items():
            times = []
            for _ in range(WARM + count):
                start = time.perf_counter()
                way()
                times.append((time.perf_counter() - start) * 1e6)
            found[f"{name}, {number}"] = [median(times[WARM:]), min(times[WARM:])]
    distributed.destroy_process_group()
    print(json.dumps(found))


def rows_of(numbers: Any) -> Any:
    """The same numbers in rows that fit into a slot."""
    return numbers.view(-1, min(numbers.numel(), 1 << 16))


def added(ranks: Any, own: Any) -> Any:
    """The sum over the ranks."""
    return ranks.gather(own).unflatten(1, (SIZE, -1)).sum(1)


def steps(path: Path, rows: int, count: int, size: int) -> tuple[float, float]:
    """Milliseconds of a decode step of an engine with `size` ranks: the whole step, and the host's CPU time."""
    from benchmarks.offline.runners import Quire
    from quire.protocol.request import EngineRequest
    from quire.protocol.sampling_params import SamplingParams

    settings = {
        "async_scheduling": False, "kv_cache_memory_bytes": 256 << 20, "distributed_executor_backend": "mp", "tensor_parallel_size": size
    }  # fmt: skip
    engine: Any = Quire(path, "bfloat16", rows, PROMPT + WARM + count + 8, settings)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=WARM + count, ignore_eos=True, seed=0)
        for number in range(rows):
            engine.client.submit(EngineRequest(str(number), [5 + number] * PROMPT, params))
        found = []
        for _ in range(WARM + count):
            wall, cpu = time.perf_counter(), time.thread_time()
            engine.client.outputs()
            found.append((time.perf_counter() - wall, time.thread_time() - cpu))
        walls, cpus = zip(*found[WARM:], strict=True)
        return median(walls) * 1e3, median(cpus) * 1e3
    finally:
        engine.close()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    shapes.add_options(parser, "qwen3-0.6b")
    add("--bytes", nargs="+", type=int, default=BYTES, metavar="N", help="of an exchange")
    add(
        "--repeats",
        type=int,
        default=2000,
        help="exchanges of the smallest number of bytes; fewer of more",
    )
    add("--rows", nargs="+", type=int, default=[1, 16], metavar="N", help="of a step; 0: no steps")
    add("--steps", type=int, default=40)
    given = parser.parse_args(argv)
    found = exchanges(given.bytes, given.repeats)
    lines = [
        "| exchange, bytes | median, us | least, us | of gloo's, medians |",
        "|---|---|---|---|",
    ]
    for name, (middle, least) in found.items():
        what, number = name.rsplit(", ", 1)
        gloo = found.get(f"{what}, gloo, {number}")
        beside = "" if gloo is None else f"{middle / gloo[0]:.1%}"
        lines.append(f"| {name} | {middle:.1f} | {least:.1f} | {beside} |")
    print("\n".join(lines), flush=True)
    costs = []
    if rows := [count for count in given.rows if count]:
        path = shapes.checkpoint(shapes.SHAPES[given.shape], "bfloat16", given.cache)
        lines += ["", "| rows | ranks | step, ms | host, ms |", "|---|---|---|---|"]
        for count in rows:
            for size in (1, SIZE):
                step, host = steps(path, count, given.steps, size)
                costs.append({"rows": count, "ranks": size, "step_ms": step, "host_ms": host})
                lines.append(f"| {count} | {size} | {step:.2f} | {host:.3f} |")
                print(lines[-1], flush=True)
    if given.out is not None:
        from benchmarks import result_files

        command = " ".join(["python -m benchmarks ranks", *argv])
        result = {"command": command, "shape": given.shape, "cores": os.cpu_count(), "exchanges_us": found, "steps": costs}  # fmt: skip
        title = "What the exchange of ranks costs"
        print(
            f"kept in {result_files.keep(given.out, 'ranks', title, result, chr(10).join(lines))}"
        )
    return 0


if __name__ == "__main__":
    rank(*sys.argv[1:])
