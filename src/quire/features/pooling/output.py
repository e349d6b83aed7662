"""The model output of pooling models: a vector or scores for each request whose prompt this step completes.

Knows tasks and rows. Does not know how states are pooled (`pooled_rows.py`) or what follows them (`layers/pooler.py`). Each
request is computed by itself, so its bits do not depend on other requests.

Shape suffixes: T tokens of this step, D features, N tokens of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.config.pooling import PoolingModel
from quire.errors import NOT_FINITE
from quire.features.pooling.pooled_rows import ALL, PooledStates
from quire.forward_context import ForwardBatch
from quire.protocol.output import ErrorKind
from quire.protocol.plan import EnteredRow, StepPlan, StepResult
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.tensor_data import TensorData

if TYPE_CHECKING:
    from quire.layers.pooler import Pooler
    from quire.models.base import LanguageModel
    from quire.worker.request_rows import RequestRows


class PooledRow:
    """A request in a row: what it asks for, and its pooled states; or why it fails."""

    __slots__ = ("fault", "length", "params", "states", "task")

    def __init__(self, new: EnteredRow, model: PoolingModel):
        self.length = new.num_prompt
        self.params = new.params if isinstance(new.params, PoolingParams) else PoolingParams()
        self.task = self.params.task or model.info.tasks[0]
        self.fault = self._fault(new, model)
        self.states = PooledStates(*self._pooled_parts(new, model))

    def _fault(self, new: EnteredRow, model: PoolingModel) -> str:
        tasks, params = model.info.tasks, self.params
        if not isinstance(new.params, PoolingParams):
            return f"this model generates no tokens; it offers {', '.join(tasks)}"
        if self.task not in tasks:
            return f"task={self.task}: this model offers {', '.join(tasks)}"
        if params.pool_from >= new.num_prompt:
            return f"pool_from={params.pool_from}: the prompt has {new.num_prompt} tokens, so none is pooled"
        if new.num_computed_tokens and self.task not in model.info.cached_tasks:
            return (
                f"task={self.task} needs every token of the prompt: set skip_reading_prefix_cache"
            )
        labels = params.returned_token_ids or ()
        if labels and max(labels) >= model.info.num_labels:
            return f"returned_token_ids={labels}: the model has {model.info.num_labels} labels"
        return ""

    def _pooled_parts(self, new: EnteredRow, model: PoolingModel) -> tuple[list[str], int, Any]:
        params = self.params
        if not self.task.startswith("token_"):
            return model.poolers if model.splade is None else [ALL], params.pool_from, None
        step = model.step_tag_id if params.step_tag_id is None else params.step_tag_id
        only: list[int] | range | None = None
        if model.edges:
            first, last = model.edges
            end = len(new.tokens) - (self.task == "token_classify" and new.tokens[-1] == last)
            only = range(int(new.tokens[0] == first), end)
        if self.task == "token_classify" and step is not None:
            only = [position for position, token in enumerate(new.tokens) if token == step]
        return [ALL], params.pool_from, only


class PooledOutput:
    """See `worker.ModelOutput`.

    Args:
        model: the main model, with a pooler.
        rows: state by row.
    """

    def __init__(self, model: LanguageModel, rows: RequestRows, pooling: PoolingModel):
        self.model, self.rows, self.pooling = model, rows, pooling
        self.by_row: dict[int, PooledRow] = {}

    def enter(self, new: EnteredRow) -> None:
        self.by_row[new.row] = PooledRow(new, self.pooling)

    def leave(self, row: int) -> None:
        self.by_row.pop(row, None)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """The fast path draws tokens, and keeps no hidden states."""
        return False

    def finish(self, plan: StepPlan, batch: ForwardBatch, hidden_TD: Tensor) -> PooledStep:
        """Pool this step's hidden states, and compute the outputs of the requests that end."""
        step = PooledStep(plan.step, len(plan.work))
        start = 0
        for index, (item, length) in enumerate(zip(plan.work, batch.lengths, strict=True)):
            row, end = self.by_row[item.row], start + item.num_tokens
            if row.fault:
                step.errors[index] = row.fault
            else:
                row.states.add(hidden_TD[start:end], length - item.num_tokens)
                if length == row.length:
                    step.outputs[index] = self._output(row, hidden_TD)
            start = end
        return step

    def _output(self, row: PooledRow, hidden_TD: Tensor) -> Tensor:
        pooler: Pooler = self.model.pooler  # type: ignore[assignment]
        info, params, states = self.pooling.info, row.params, row.states
        dimensions = params.dimensions or self.pooling.pinned
        choice = params.use_activation
        if row.task == "embed":
            activate = info.normalizes if choice is None else choice
            parts = states.parts(hidden_TD.device)
            if self.pooling.splade is not None:
                parts = [pooler.splade(states.tokens(hidden_TD))]
            return pooler.embed(parts, dimensions, activate)
        if row.task == "classify":
            activate = info.default_activation if choice is None else choice
            return pooler.classify(states.parts(hidden_TD.device), activate)
        tokens_ND = states.tokens(hidden_TD)
        if row.task == "token_embed":
            activate = self.pooling.normalizes_tokens if choice is None else choice
            return pooler.token_embed(tokens_ND, dimensions, activate)
        activate = info.default_activation if choice is None else choice
        labels = params.returned_token_ids or self.pooling.returned_token_ids
        return pooler.token_classify(tokens_ND, activate, labels)


class PooledStep:
    """A queued step; on a device its outputs are copied when the result is read."""

    def __init__(self, step: int, num_items: int):
        self.step, self.num_items = step, num_items
        self.outputs: dict[int, Tensor] = {}  # by work item
        self.errors: dict[int, str] = {}

    def result(self) -> StepResult:
        result = StepResult(self.step, [[] for _ in range(self.num_items)])
        kinds: dict[int, ErrorKind] = dict.fromkeys(self.errors, "invalid")
        result.errors, result.kinds = dict(self.errors), kinds
        for index, output in self.outputs.items():
            array = output.detach().to("cpu", torch.float32).contiguous()
            if not bool(torch.isfinite(array).all()):
                result.errors[index] = NOT_FINITE
                continue
            result.tensors[index] = TensorData("float32", array.shape, array.numpy().tobytes())
        return result
