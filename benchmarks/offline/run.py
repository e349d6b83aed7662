"""`python -m benchmarks` and `make bench`: offline throughput, compared with Transformers, and host overhead per step.

It runs five workloads on a random checkpoint of each shape. The engines alternate within each round; it reports medians
over rounds, in one result file per shape. It downloads nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import host_overhead, result_files, roofline, scheduler_step, shapes
from benchmarks.offline.runners import Contender, Quire, Transformers, agreement

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
SHAPES = ["qwen3-0.6b", "llama-3.2-1b"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", nargs="+", choices=shapes.SHAPES, default=SHAPES, metavar="NAME",
        help=f"models, one after the other, of {', '.join(shapes.SHAPES)}; unset: {' and '.join(SHAPES)}",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=ITEMSIZE, default="bfloat16", help="number format")
    parser.add_argument("--rounds", type=int, default=3, help="how often each workload is run")
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=[w.name for w in shapes.WORKLOADS],
        metavar="ROWSxIN/OUT",
        help=f"of {', '.join(w.name for w in shapes.WORKLOADS)}; unset: all",
    )
    parser.add_argument(
        "--host-rows", nargs="*", type=int, default=[1, 32, 256], metavar="N",
        help="what a step of N rows costs the host; none: not measured",
    )  # fmt: skip
    parser.add_argument("--no-peer", action="store_true", help="do not run Transformers beside it")
    parser.add_argument(
        "--threads", type=int, help="compute threads of both; unset: the engine's choice"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder of results"
    )
    parser.add_argument(
        "--cache", type=Path, help="folder of the random checkpoints; unset: temporary"
    )
    parser.add_argument(
        "--engine-options", type=json.loads, default={}, metavar="JSON",
        help='more keywords of the engine, such as {"max_num_batched_tokens": 4096}',
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv), argv)


def run(args: argparse.Namespace, words: Sequence[str] = ()) -> int:
    """Measure each shape, print and save the results; return 0.

    Args:
        words: the command line that `args` came from, for the result file.
    """
    for name in args.shape:
        _run(shapes.SHAPES[name], args, words)
    return 0


def _run(shape: shapes.Shape, args: argparse.Namespace, words: Sequence[str]) -> None:
    import torch

    chosen = [w for w in shapes.WORKLOADS if not args.workloads or w.name in args.workloads]
    cache = args.cache or Path(tempfile.gettempdir()) / "quire-bench"
    print(f"random {shape.name} checkpoint in {cache}", flush=True)
    path = shapes.checkpoint(shape, args.dtype, cache)
    if args.threads:
        torch.set_num_threads(args.threads)
    contenders: list[Contender] = [_engine(path, args, chosen)]
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.no_peer:
        contenders.append(Transformers(path, args.dtype))
    try:
        result = _measure(args, shape, chosen, contenders)
        result["command"] = " ".join(["python -m benchmarks", *words])
    finally:
        for contender in contenders:
            contender.close()
    costs = []
    if args.host_rows:
        costs = host_overhead.measure_all(shape, cache, args.host_rows, host_overhead.STEPS)
        print("\n".join(cost.line(shape.name) for cost in costs))
    _keep(result, costs, args.out)


def _engine(path: Path, args: argparse.Namespace, chosen: list[shapes.Workload]) -> Quire:
    rows = max(w.rows for w in chosen)
    tokens = max(w.prompt + w.output for w in chosen)
    return Quire(path, args.dtype, rows, tokens, args.engine_options)


def _measure(
    args: argparse.Namespace,
    shape: shapes.Shape,
    chosen: list[shapes.Workload],
    contenders: list[Contender],
) -> dict[str, Any]:
    described = roofline.describe()
    step_costs = scheduler_step.measure_all()
    probes = [roofline.probe(args.dtype)]
    seconds: dict[tuple[str, str], list[float]] = {}
    agreed: dict[str, float] = {}
    for contender in contenders:  # warm up
        contender.run(shapes.Workload(1, 8, 2), shapes.Workload(1, 8, 2).prompts(shape.vocab))
    for number in range(1, args.rounds + 1):
        for workload in chosen:
            prompts, tokens = workload.prompts(shape.vocab), []
            for contender in contenders:
                done = contender.run(workload, prompts)
                seconds.setdefault((workload.name, contender.name), []).append(done.seconds)
                tokens.append(done.tokens)
                print(
                    f"round {number}  {workload.name:>9}  {contender.name:<12} {done.seconds:8.3f} s",
                    flush=True,
                )
            if len(tokens) == 2:
                agreed[workload.name] = agreement(*tokens)
        probes.append(roofline.probe(args.dtype))
    best = roofline.Probe(max(p.bytes_per_s for p in probes), max(p.flops_per_s for p in probes))
    rows = []
    for workload in chosen:
        floor, predicted = (
            roofline.seconds(
                shape, workload, ITEMSIZE[args.dtype], best if s is roofline.FLOOR else probes[0], s
            )
            for s in (roofline.FLOOR, roofline.PREDICTED)
        )
        by_name = {c.name: seconds[workload.name, c.name] for c in contenders}
        measured = result_files.Measured(
            workload, by_name, floor, predicted, agreed.get(workload.name)
        )
        rows.append(measured.row())
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "shape": shape.name,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "commit": result_files.commit(),
        "machine": described,
        "probes": [asdict(p) for p in probes],
        "workloads": rows,
        "steps": [asdict(cost) for cost in step_costs],
    }


def _keep(result: dict[str, Any], costs: Sequence[host_overhead.HostCost], folder: Path) -> None:
    kind = roofline.slug(result["machine"])
    result["host"] = host_overhead.kept(costs)
    last = result_files.last_like(result, folder, kind)
    folder.mkdir(parents=True, exist_ok=True)
    path = result_files.free_name(folder, f"{result['date']}-{result['shape']}-{kind}")
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = result_files.page(result, last)
    if costs:
        text += f"\nWhat a step of the whole engine costs the host, in bfloat16:\n\n{host_overhead.table(costs)}\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nresult in {path}")
