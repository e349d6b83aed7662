"""Feature: everything that one feature plugs into Quire, as one object. `features/<name>/feature.py` has one for each feature.

`engine/enabled_features.py` lists the features and makes the objects; the builders (`engine/build.py`, `worker/build.py`) and
the frontend call their methods and know none by name. docs/design/adding-a-feature.md says in which order.

Each process makes one object for each enabled feature, and calls these methods:

    frontend    prompt_reader, request_extra, num_encoder_tokens, answer, usage
    engine      begin, models, limits, waiting_queue, plug_into_engine, and the methods of EngineListener
    worker      begin, models, memory, plug_into_worker        the engine's object, if the worker is in the engine's process

No torch here, nor in a module of a feature at import; `plug_into_worker` imports what needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.engine import ModelSpec, Resolved
from quire.engine.core import EngineCore
from quire.engine.listener import EngineListener
from quire.protocol.bucket_counts import BucketCounts
from quire.protocol.request import RequestParams
from quire.scheduler.gate import Gate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from quire.kvcache.checkpoints import CheckpointPool
    from quire.kvcache.manager import PrefixLimit
    from quire.parallel.layout import RankLayout
    from quire.worker.build import WorkerParts
    from quire.worker.memory_plan import MemoryLine
    from quire.worker.worker_info import WorkerInfo


@dataclass
class EngineParts:
    """The parts of an engine that is being built; features add theirs.

    Attributes:
        core: the engine's loop, complete but for these parts.
        info: what the worker reported.
        checkpoints: which recurrent states are kept for later requests; None: none are.
        gates: the scheduler asks them in ascending `Gate.order`.
        prefix_limits: what cached prefixes need besides their blocks.
        calls: functions that `EngineClient.call` may name.
        counters: names of counters, which start at 0 in `core.counts`.
        histograms: by their names in `metric_table.ENGINE_HISTOGRAMS`.
        labels: texts for labels of metrics, by name.
        state_files: by file name: restores state from a file of an earlier process, and writes it there from now on.
        ready: further fields of the engine's EngineReady.
    """

    core: EngineCore
    info: WorkerInfo
    checkpoints: CheckpointPool | None = None
    gates: list[Gate] = field(default_factory=list)
    prefix_limits: list[PrefixLimit] = field(default_factory=list)
    calls: dict[str, Callable[..., Any]] = field(default_factory=dict)
    counters: list[str] = field(default_factory=list)
    histograms: dict[str, BucketCounts] = field(default_factory=dict)
    labels: dict[str, Callable[[], str]] = field(default_factory=dict)
    state_files: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    ready: dict[str, Any] = field(default_factory=dict)

    def wake(self) -> None:
        """Wake the engine's loop, from any thread."""
        self.core.inbox.put(None)


class Feature(EngineListener):
    """The base plugs nothing in. A feature overrides the methods that it needs.

    Attributes:
        name: of its folder. Its gate, its hook, and its data in requests and outputs have the same name.
        order: features plug in in ascending order, so a feature that replaces the model input wraps the model input of the features
            before it. Gates, hooks and logits processors have an `order` of their own.
        prompt_reader: the class of the frontend that reads what the feature takes in prompts beside text and tokens
            (`frontend/prompt_reader.py`), as "module:class", since the frontend is above the features; empty: none.
    """

    name = "feature"
    order = 50
    prompt_reader = ""

    def __init__(self, resolved: Resolved):
        self.resolved = resolved

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        """Whether this configuration uses the feature. Evaluated in every process, without torch."""
        return True

    def begin(self) -> None:
        """This process builds an engine or a worker: start what may run while weights load."""

    # -- models and memory ------------------------------------------------------------------------
    def models(self) -> Sequence[ModelSpec]:
        """Models beside the main one: drafters, encoders. The last stage of a pipeline loads them; they are planned, sleep
        and wake up with the main one. `WorkerParts.places` says where they are.

        Raises:
            ConfigError: a model does not fit the main one.
        """
        return ()

    def memory(self, layout: RankLayout, stage: int) -> Sequence[MemoryLine]:
        """Lines of the memory plan of a rank of this stage, beside the weights of `models`."""
        return ()

    # -- the engine -------------------------------------------------------------------------------
    def limits(self, limits: SchedulerLimits) -> SchedulerLimits:
        """The limits of the scheduler, with those that the feature sets."""
        return limits

    def waiting_queue(self) -> WaitingQueue | None:
        """What orders waiting requests; None: by priority and arrival. One feature at most has a queue."""
        return None

    def plug_into_engine(self, engine: EngineParts) -> None:
        """Add gates, calls, counters and the like. Once, in the engine's process, when the workers are built."""

    # -- the worker -------------------------------------------------------------------------------
    def plug_into_worker(self, parts: WorkerParts) -> None:
        """Add hooks, logits processors and functions; replace the model input or output. Once, in each worker's process, when
        the models are loaded. May import torch.

        Raises:
            ConfigError: the feature does not work with this model.
        """

    # -- the frontend -----------------------------------------------------------------------------
    def request_extra(self, params: RequestParams) -> bytes | None:
        """What a request with these parameters carries to the gate (`Request.extras`) and to the hook (`EnteredRow.extras`),
        by the feature's name; None: nothing. All ranks get it once.

        Raises:
            ValidationError: the feature cannot serve the request.
        """
        return None

    def num_encoder_tokens(self, extra: bytes) -> int:
        """How many states the encoder of a model with cross attention makes of what `request_extra` returned. The feature's hook
        puts them into `ForwardBatch.encoder` when the request's row is new there."""
        return 0

    def answer(self, details: Sequence[Any]) -> Any:
        """What `CompletionOutput.details` says of a finished output. `details`: what the gate added to the outputs of its steps
        (`Gate.add_output_details`), at least one."""
        return details[-1]

    def usage(self, answer: Any | None) -> dict[str, Any]:
        """What the `metrics` of an HTTP answer with one output say. `answer`: as `answer` returned it; None: there was none."""
        return {}
