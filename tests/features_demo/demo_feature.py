"""A feature that plugs a part into every joint of `quire.engine.feature.Feature`. No torch at import.

A request with `extra_args={"demo": TOKEN}` never gets this token. The number travels in the request's extras; the answer says how
many steps the request had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.engine import ModelSpec, Resolved
from quire.engine.feature import EngineParts, Feature
from quire.errors import ValidationError
from quire.models.hf_config import read_config
from quire.parallel.layout import RankLayout
from quire.protocol.output import EngineOutput
from quire.protocol.plan import StepPlan
from quire.protocol.request import EngineRequest, RequestParams
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.gate import Gate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import Request
from quire.scheduler.waiting_queue import WaitingQueue
from quire.worker.memory_plan import MemoryLine

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts

NAME = "demo"
RESERVED = 3 << 20


class DemoQueue(WaitingQueue):
    """Counts what it gets."""

    added = 0

    def add(self, request: Request) -> None:
        self.added += 1
        super().add(request)


class DemoGate(Gate):
    """Sends the hook the numbers of a plan's new requests, and counts what the hook reports."""

    name = NAME
    order = 40

    def __init__(self, counts: dict[str, float]):
        self.counts = counts
        self.entered: list[int] = []
        self.ids: list[str] = []
        self.usable_asked = 0

    def receive(self, received: EngineRequest, number: int) -> EngineRequest:
        if received.extras.get(NAME) == b"0":
            raise ValidationError("demo: 0 is not served")
        return received

    def enter(self, request: Request) -> None:
        if NAME in request.extras:
            self.entered.append(request.number)

    def data_for_hook(self, plan: StepPlan) -> bytes | None:
        entered, self.entered = self.entered, []
        return msgspec.msgpack.encode(entered) if entered else None

    def data_from_hook(self, extra: bytes) -> None:
        self.ids = msgspec.msgpack.decode(extra, type=list[str])
        self.counts["demo_steps"] += 1

    def add_output_details(self, outputs: list[EngineOutput]) -> None:
        ids, self.ids = self.ids, []
        for output in outputs:
            if output.id in ids:
                output.details[NAME] = len(output.tokens)

    # -- as a PrefixLimit
    def usable(self, request: Any, num_found: int, num_blocks: int) -> int:
        self.usable_asked += 1
        return num_blocks

    def reset(self) -> None:
        self.usable_asked = 0


class DemoFeature(Feature):
    """See above. The further model is in the folder `second` beside the main one's."""

    name = NAME
    order = 65
    prompt_reader = "demo_reader:DemoReader"

    def __init__(self, resolved: Resolved):
        super().__init__(resolved)
        self.events: list[str] = []
        self.began = self.total = 0
        self.file: Path | None = None
        self.queue = DemoQueue()

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return Path(resolved.path).with_name("second").is_dir()

    def begin(self) -> None:
        self.began += 1

    def models(self) -> Sequence[ModelSpec]:
        path = str(Path(self.resolved.path).with_name("second"))
        config = read_config(path, {})
        kind = config["architectures"][0]
        spec = replace(self.resolved.spec, path=path, hf_config=config, architecture=kind)
        return (replace(spec, is_split=False),)

    def memory(self, layout: RankLayout, stage: int) -> Sequence[MemoryLine]:
        return (
            MemoryLine("demo tables", RESERVED, f"in stage {stage}", lower="demo_size"),
            MemoryLine("demo host tables", 5, where="host"),
        )

    def limits(self, limits: SchedulerLimits) -> SchedulerLimits:
        return replace(limits, max_waiting=20)

    def waiting_queue(self) -> WaitingQueue:
        return self.queue

    def plug_into_engine(self, engine: EngineParts) -> None:
        gate = DemoGate(engine.core.counts)
        engine.gates.append(gate)
        engine.prefix_limits.append(gate)
        engine.counters.append("demo_steps")
        engine.labels["demo"] = lambda: f"total {self.total}"
        engine.calls |= {"demo_add": self.add, "demo_events": lambda: self.events}
        engine.state_files["demo-total"] = self.persist

    def add(self, number: int) -> int:
        self.total += number
        if self.file is not None:
            self.file.write_text(str(self.total))
        return self.total

    def persist(self, path: Path) -> None:
        self.file = path
        if path.exists():
            self.total = int(path.read_text())

    def on_pause(self) -> None:
        self.events.append("pause")

    def on_resume(self) -> None:
        self.events.append("resume")

    def on_sleep(self, level: int) -> None:
        self.events.append(f"sleep {level}")

    def on_wake_up(self, parts: Sequence[str]) -> None:
        self.events.append("wake " + " ".join(parts))

    def on_cache_reset(self) -> None:
        self.events.append("reset")

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from demo_worker_parts import plug_in

        plug_in(parts, NAME)

    def request_extra(self, params: RequestParams) -> bytes | None:
        chosen = (params.extra_args or {}) if isinstance(params, SamplingParams) else {}
        if (token := chosen.get(NAME)) is None:
            return None
        if not isinstance(token, int):
            raise ValidationError("demo: must be a token", parameter="extra_args", value=token)
        return str(token).encode()

    def answer(self, details: Sequence[Any]) -> Any:
        return {"steps": len(details), "tokens": sum(details)}

    def usage(self, answer: Any | None) -> dict[str, Any]:
        return {} if answer is None else {NAME: answer}


class ConstantFeature(Feature):
    """Replaces the model output: every token is 7."""

    name = "constant"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return Path(resolved.path).with_name("constant").is_dir()

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from demo_worker_parts import ConstantOutput

        parts.model_output = ConstantOutput(parts.models[0], parts.rows)
