"""Worker: runs the steps of one device. Assembly chooses its model input, model output and hooks.

Knows the order of a step. Does not know which features are on, nor any by name. Keep it so: a feature
that must act here is a hook, a model input or a model output.

    rows that left -> rows that enter -> batch -> hooks before -> model input -> model output -> hooks after

`model_runner.py` runs batch, model input and model output; on the fast path, if these, and each hook, accept it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from quire.errors import PlanMismatch, RankLost, StepFailed
from quire.forward_context import ForwardBatch
from quire.protocol.plan import StepPlan, StepResult
from quire.worker.hooks import Hook
from quire.worker.input_batch import InputBatchBuilder
from quire.worker.model_input import ModelInput
from quire.worker.model_runner import ModelOutput, ModelRunner, QueuedStep
from quire.worker.request_rows import RequestRows
from quire.worker.rpc import call_method

if TYPE_CHECKING:
    from quire.models.base import LanguageModel
    from quire.native.step import NativeStep

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _recoverable(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Turn the function's exceptions into `StepFailed`, which fails only this step."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except (torch.AcceleratorError, PlanMismatch, RankLost):
            raise  # the device or another rank is lost, or the rows are wrong
        except Exception as error:
            raise StepFailed(f"{type(error).__name__}: {error}") from error

    return run


class Worker(ModelRunner):
    """Runs plans in the order in which they arrive.

    Args:
        platform: describes the device; None: the CPU, as tests use it.
        model: the main model.
        rows: state by row; `batcher` defaults to one over it.
        functions: further functions that `call` can name, besides the worker's own.
        fast_step: the fast path for some plans, if there is one.
        models: all models, the main one first, if features have models of their own. The worker keeps this list.
        runners: of the other models.
    """

    def __init__(
        self,
        platform: Any,
        model: LanguageModel,
        model_input: ModelInput,
        model_output: ModelOutput,
        hooks: Sequence[Hook],
        rows: RequestRows,
        batcher: InputBatchBuilder | None = None,
        functions: dict[str, Callable[..., Any]] | None = None,
        fast_step: NativeStep | None = None,
        models: list[LanguageModel] | None = None,
        runners: Sequence[ModelRunner] = (),
    ):
        super().__init__(model_input, model_output, rows, batcher, fast_step)
        self.platform, self.hooks, self.runners = platform, list(hooks), runners
        self.acting: Sequence[Hook] = ()  # of these, in the last step
        self.functions: dict[str, Callable[..., Any]] = {
            "ping": lambda: True,
            "num_parameters": lambda: sum(p.numel() for p in self.model.parameters()),
            "collective_rpc": functools.partial(call_method, self),
            **(functions or {}),
        }
        self.unfused_for: set[str] = set()
        self.models = models or [model]
        rows.vocab_size = getattr(model, "vocab_size", rows.vocab_size)
        self.set_models(list(self.models))

    def set_models(self, models: Sequence[LanguageModel]) -> None:
        """Run these models from now on, the main one first. No row may be in use."""
        self.models[:] = models
        self.use_model(model := models[0])
        # Some models keep a cache for each row. They must drop it when the row gets another request.
        self.forget: Callable[[list[int]], None] | None = (
            getattr(model, "forget", None) if getattr(model, "per_request", False) else None
        )
        for hook in self.hooks:
            hook.use_models(self.models)
        self._update_fusion()

    def unfuse(self, reason: str) -> None:
        """Run module by module from now on, without fused layers, captured graphs and the fast path.

        For features that change modules, or move their memory. No step may be in flight. Each reason counts once.
        """
        self.unfused_for.add(reason)
        self._update_fusion()

    def fuse(self, reason: str) -> None:
        """Take back `unfuse(reason)`."""
        self.unfused_for.discard(reason)
        self._update_fusion()

    def _update_fusion(self) -> None:
        fused = not self.unfused_for
        self.model_input.set_fused(fused)
        if self.fast_step is not None:
            (self.fast_step.fuse if fused else self.fast_step.unfuse)(self.models)
        for runner in self.runners:
            runner.set_fused(fused)

    def run(self, plan: StepPlan) -> QueuedStep:
        """Queue one step.

        Raises:
            StepFailed: the forward pass failed; its rows must leave, and other rows can continue.
            RuntimeError: the plan contradicts earlier plans; the worker's state cannot be trusted.
            RankLost: another rank of this engine did not take part.
        """
        if plan.freed_rows or plan.entered:
            self._update_rows(plan)
            self._update_hooks(plan)
        self.acting = [hook for hook in self.hooks if plan.step >= hook.idle_until]
        queued: QueuedStep
        if not plan.work or self.accepts_fast_step(plan, self.acting):
            self._call_before(plan, None)
            queued = FinishedStep(self._run_fast(plan))
        else:
            queued = self._by_parts(plan)
        step = _Step(queued, self.acting, self.rows, plan)
        self._call_after(plan)
        return step

    @_recoverable
    def _update_hooks(self, plan: StepPlan) -> None:
        for hook in self.hooks:
            for row in plan.freed_rows:
                hook.leave(row)
            for new in plan.entered:
                hook.enter(new)

    accepts_fast_step = _recoverable(ModelRunner.accepts_fast_step)
    forward = _recoverable(ModelRunner.forward)

    @torch.inference_mode()
    def _by_parts(self, plan: StepPlan) -> QueuedStep:
        batch = self.batcher.build(plan)
        self._call_before(plan, batch)
        return self.forward(plan, batch)

    @_recoverable
    def _run_fast(self, plan: StepPlan) -> StepResult:
        if not plan.work or self.fast_step is None:
            return StepResult(plan.step, [])
        return self.fast_step.run(plan)

    @_recoverable
    def _call_before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        for hook in self.acting:
            hook.before(plan, batch)

    @_recoverable
    def _call_after(self, plan: StepPlan) -> None:
        for hook in self.acting:
            hook.after(plan)

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of this worker by name.

        Raises:
            ValueError: there is no function of that name.
        """
        if (function := self.functions.get(name)) is None:
            names = ", ".join(sorted(self.functions))
            raise ValueError(f"the worker has no function {name!r}; it has {names}")
        return function(*args)

    @torch.inference_mode()
    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self.rows.leave(row)
            self.model_output.leave(row)
        for new in plan.entered:
            self.rows.enter(new)
            self.model_output.enter(new)
        if self.forget is not None:
            self.forget([*plan.freed_rows, *(new.row for new in plan.entered)])


class _Step:
    """A queued step, with what hooks add to its result."""

    def __init__(
        self, queued: QueuedStep, hooks: Sequence[Hook], rows: RequestRows, plan: StepPlan
    ):
        self.queued, self.hooks, self.rows, self.plan = queued, hooks, rows, plan
        self.faults = rows.faults_of(plan.work)

    def result(self) -> StepResult:
        result = self.queued.result()
        for number, fault in self.faults.items():
            result.errors[number], result.kinds[number] = fault, "invalid"
        for hook in self.hooks:
            if added := hook.added_tokens(result.step):
                for number, item in enumerate(self.plan.work):
                    if (tokens := added.get(item.row)) is not None:
                        result.added_tokens[number] = tokens
                        self.rows.append(item.row, tokens)
            if (extra := hook.report()) is not None:
                result.extras[hook.name] = extra
        return result


class FinishedStep:
    """A queued step that has already run, so its result is available at once."""

    def __init__(self, result: StepResult):
        self._result = result

    def result(self) -> StepResult:
        return self._result
