"""`python -m benchmarks host`: host overhead of an engine step beside the model, by part and number of decoding rows.

It uses the real scheduler, worker, sampler and socket, on a random checkpoint. It times the entry point of each part;
the rest of a step is "other".

    plan       the scheduler makes the plan       launch     row updates, hooks, bookkeeping around the forward pass
    batch      the plan becomes model input       sample     logits to tokens, and the tokens to the host
    model      the forward pass and the head      commit     the scheduler processes the result
                                                  publish    encode outputs, send them to the frontend's socket

On the fast path (`native/step.py`), one kernel call is "model": it also gathers the input and draws the tokens,
so it includes batch and sample.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks import shapes

GOALS = {
    1: 0.03
}  # rows -> the host's share of a step, with GOAL_SHAPE, about the smallest model worth serving
GOAL_SHAPE = "qwen3-0.6b"
PROMPT = 16
STEPS = 20  # measured steps
WARM = 3  # warm-up steps
HOST = ("plan", "batch", "launch", "sample", "commit", "publish", "other")


@dataclass(frozen=True, slots=True)
class HostCost:
    """Medians in milliseconds per step, all rows decoding."""

    rows: int
    parts: dict[str, float]
    model: float
    step: float

    @property
    def host(self) -> float:
        return self.step - self.model

    @property
    def share(self) -> float:
        return self.host / self.step

    def line(self, shape: str) -> str:
        goal = GOALS.get(self.rows) if shape == GOAL_SHAPE else None
        verdict = "" if goal is None else f"   goal {goal:.0%}: {'met' if self.share < goal else 'missed'}"  # fmt: skip
        parts = "  ".join(f"{name} {self.parts[name]:.3f}" for name in HOST)
        return (
            f"{self.rows:>4} rows  step {self.step:8.3f} ms  model {self.model:8.3f}  host {self.host:6.3f}"
            f" ({self.share:.1%}): {parts}{verdict}"
        )


class Stopwatch:
    """Milliseconds by name since the last `read`. The caller subtracts nested parts."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + (time.perf_counter() - start) * 1e3

        return timed

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        setattr(owner, attribute, self.around(name, getattr(owner, attribute)))

    def read(self) -> dict[str, float]:
        found, self.spent = self.spent, {}
        return found


def watched(core: Any) -> Stopwatch:
    """A stopwatch on the parts of an engine whose worker is in this process."""
    watch, worker = Stopwatch(), core.executor.worker
    watch.watch(core.scheduler, "plan", "plan")
    watch.watch(core.scheduler, "commit", "commit")
    watch.watch(worker.batcher, "build", "batch")
    watch.watch(worker.model_input, "forward", "forward")
    watch.watch(worker.model, "logits", "head")
    watch.watch(worker.model_output, "finish", "finish")
    if worker.fast_step is not None:  # do not patch the kernels: the process shares them
        whole = worker.fast_step.kernels
        worker.fast_step.kernels = SimpleNamespace(step=watch.around("whole", whole.step))
    launch = watch.around("launch", core.executor.launch)

    def launched(plan: Any) -> Any:
        pending = launch(plan)
        return _Timed(watch.around("result", pending.result))

    core.executor.launch = launched
    return watch


@dataclass(frozen=True, slots=True)
class _Timed:
    result: Callable[[], Any]


def parts(spent: dict[str, float], step: float) -> tuple[dict[str, float], float]:
    """Host time by part, and the model's time; together they are the step."""
    get = spent.get
    whole = get("whole", 0.0)
    model = get("forward", 0.0) + get("head", 0.0) + whole
    found = {
        "plan": get("plan", 0.0),
        "batch": get("batch", 0.0),
        "launch": get("launch", 0.0)
        - get("batch", 0.0)
        - get("forward", 0.0)
        - get("finish", 0.0)
        - whole,
        "sample": get("finish", 0.0) - get("head", 0.0) + get("result", 0.0),
        "commit": get("commit", 0.0),
        "publish": get("publish", 0.0),
    }
    found["other"] = step - model - sum(found.values())
    return found, model


def measure(client: Any, watch: Stopwatch, link: Any, vocab: int, rows: int, steps: int) -> HostCost:  # fmt: skip
    """Measure `steps` decode steps of `rows` rows.

    Raises:
        RuntimeError: a step did not contain all rows, or a request failed.
    """
    from quire.protocol.request import EngineRequest
    from quire.protocol.sampling_params import SamplingParams

    core = client.core
    prompts = shapes.Workload(rows, PROMPT, 1).prompts(vocab)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 64 + rows, ignore_eos=True, seed=0, detokenize=False)  # fmt: skip
    names = [f"host-{rows}-{number}" for number in range(rows)]
    for name, prompt in zip(names, prompts, strict=True):
        client.submit(EngineRequest(name, prompt, params))
    core.receive(block=False)
    begun: set[str] = set()
    while len(begun) < rows:
        begun |= {output.id for output in _checked(core.step())}
    found: list[tuple[dict[str, float], float, float]] = []
    publish = watch.around("publish", link.send)
    for number in range(WARM + steps):
        watch.read()
        start = time.perf_counter()
        core.receive(block=False)
        outbox = core.step()
        publish(outbox)
        step = (time.perf_counter() - start) * 1e3
        if len(_checked(outbox)) != rows:
            raise RuntimeError(f"{len(outbox)} of {rows} rows were in the step")
        if number >= WARM:
            found.append((*parts(watch.read(), step), step))
    client.abort(names)
    core.receive(block=False)
    medians = {name: median(one[0][name] for one in found) for name in HOST}
    return HostCost(rows, medians, median(one[1] for one in found), median(one[2] for one in found))


def _checked(outbox: Sequence[Any]) -> Sequence[Any]:
    for output in outbox:
        if output.error is not None:
            raise RuntimeError(output.error)
    return outbox


def measure_all(shape: shapes.Shape, cache: Path, rows: Sequence[int], steps: int) -> list[HostCost]:  # fmt: skip
    import zmq

    from benchmarks.offline.runners import Quire
    from quire.engine.engine_main import FrontendLink

    path = shapes.checkpoint(shape, "bfloat16", cache)
    most = max(rows)
    tokens = PROMPT + WARM + steps + 128  # of a row, whole blocks
    room = most * tokens * shape.kv_elements * 2
    engine = Quire(
        path, "bfloat16", most, PROMPT + steps + most + 80, {"async_scheduling": False, "kv_cache_memory_bytes": room}
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        # The frontend's end of the socket. Nothing reads from it: reading is not a cost of the engine.
        front = context.socket(zmq.PULL)
        front.setsockopt(zmq.RCVHWM, 0)
        front.bind(f"ipc://{folder}/up-0")
        link = FrontendLink(Path(folder), 1)
        try:
            client: Any = engine.client
            watch = watched(client.core)
            return [measure(client, watch, link, shape.vocab, number, steps) for number in rows]
        finally:
            engine.close()
            for socket in (front, link.down, *link.up):
                socket.close(linger=0)
            link.down.context.term()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    shapes.add_options(parser, GOAL_SHAPE)
    add("--rows", nargs="+", type=int, default=[1, 32, 256], metavar="N")
    add("--steps", type=int, default=STEPS, help="decode steps to measure; it prints the medians")
    given = parser.parse_args(argv)
    costs = measure_all(shapes.SHAPES[given.shape], given.cache, given.rows, given.steps)
    lines = [cost.line(given.shape) for cost in costs]
    print("\n".join(lines))
    if given.out is not None:
        from benchmarks import result_files

        command = " ".join(["python -m benchmarks host", *argv])
        result = {"command": command, "shape": given.shape, "rows": kept(costs)}
        title = f"What a step costs the host, {given.shape}"
        print(f"kept in {result_files.keep(given.out, 'host', title, result, table(costs))}")
    return 0


def kept(costs: Sequence[HostCost]) -> list[dict[str, Any]]:
    return [asdict(cost) | {"host": cost.host, "share": cost.share} for cost in costs]


def table(costs: Sequence[HostCost]) -> str:
    names = ["rows", "step, ms", "model, ms", "host, ms", "share", *(f"{name}, ms" for name in HOST)]  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for cost in costs:
        cells = [f"{cost.rows}", f"{cost.step:.3f}", f"{cost.model:.3f}", f"{cost.host:.3f}", f"{cost.share:.1%}"]  # fmt: skip
        cells += [f"{cost.parts[name]:.3f}" for name in HOST]
        lines.append(f"| {' | '.join(cells)} |")
    if any(cost.parts["batch"] == 0 for cost in costs):
        lines += ["", "A step was one call of the kernels, which gathers input and draws tokens too: all of it counts as the model's."]  # fmt: skip
    return "\n".join(lines)
