"""`python -m benchmarks paths`: CPU time of a step by each of its implementations, which take turns in one engine.

    native step      one kernel call from the rows' tokens to drawn tokens
    fused decoder    batch builder, model input, sampler; one kernel call for all layers
    modules          the same, with each module called by itself

It measures the time of the engine's thread, so it uses one thread; other load on the machine changes it little.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import shapes

PROMPT = 24
WARM = 6


def implementations(worker: Any) -> dict[str, Callable[[], None]]:
    """By name, a function that makes the worker use it from the next step on.

    Raises:
        RuntimeError: the kernels do not run this model whole.
    """
    from quire.layers.decoder import Layers

    layers = next(module for module in worker.model.modules() if isinstance(module, Layers))
    step, fused = worker.fast_step, layers.fused
    if step is None or step.model is None or fused is None:
        raise RuntimeError("the CPU kernels do not run this model in one call")

    def use(fast_step: Any, fused_layers: Any) -> Callable[[], None]:
        def switch() -> None:
            worker.fast_step, layers.fused = fast_step, fused_layers

        return switch

    return {
        "native step": use(step, fused),
        "fused decoder": use(None, fused),
        "modules": use(None, None),
    }


def measure(path: str, rows: int, steps: int, more: dict[str, Any]) -> dict[str, float]:
    """Medians in milliseconds, by implementation."""
    import torch

    from benchmarks.offline.runners import Quire
    from quire.protocol.request import EngineRequest
    from quire.protocol.sampling_params import SamplingParams

    count = 3 * steps + WARM
    settings = {"async_scheduling": False, "kv_cache_memory_bytes": 512 << 20, **more}
    engine: Any = Quire(Path(path), "bfloat16", rows, PROMPT + count + 2, settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        client = engine.client
        ways = implementations(client.core.executor.worker)
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, seed=0)
        for number in range(rows):
            client.submit(EngineRequest(str(number), [5 + number] * PROMPT, params))
        for _ in range(WARM):
            client.outputs()
        spent: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for number in range(len(names) * steps):
            name = names[(number + number // len(names)) % len(names)]
            ways[name]()
            start = time.thread_time()
            client.outputs()
            spent[name].append((time.thread_time() - start) * 1e3)
        return {name: median(times) for name, times in spent.items()}
    finally:
        torch.set_num_threads(threads)
        engine.close()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks paths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--model", choices=["quire-tiny", *shapes.SHAPES], default="quire-tiny", help="model")
    add("--quantization", help="of the weights; unset: bfloat16")
    add("--rows", nargs="+", type=int, default=[1, 16, 64], metavar="N")
    add("--steps", type=int, default=60, help="steps of each implementation")
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "quire-bench", help="folder of the random checkpoints")  # fmt: skip
    args = parser.parse_args(argv)
    path = args.model
    if path in shapes.SHAPES:
        path = str(shapes.checkpoint(shapes.SHAPES[path], "bfloat16", args.cache))
    more = {} if args.quantization is None else {"quantization": args.quantization}
    for rows in args.rows:
        found = measure(path, rows, args.steps, more)
        least = found["native step"]
        line = "  ".join(f"{name} {ms:8.3f} ({ms / least - 1:+.1%})" for name, ms in found.items())
        print(f"{rows:>4} rows  {line}", flush=True)
    return 0
