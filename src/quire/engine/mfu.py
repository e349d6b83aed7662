"""What each step costs by the sums, for `--enable-mfu-metrics`: floating-point operations, and bytes of weights and KV.

Knows config.json, what layers keep, and plans. Does not know what a step really took: beside a device's peaks this says how
much of it is used. Products alone are counted, two operations for each number of a weight and of a key or value that is
looked at; activations, which mostly stay in caches, are not.

    operations   2 x (numbers of the weights) x tokens  +  2 x heads x (sizes of key and value) x positions looked at
    read         the weights once a step                +  keys and values once for each request
    written      keys and values of the step's tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.engine import Resolved
from quire.engine.core import EngineCore
from quire.engine.memory_plan import ITEMSIZE, forecast_weights
from quire.kvcache.specs import CacheSpec, WindowSpec
from quire.protocol.plan import StepPlan, WorkItem

if TYPE_CHECKING:
    from quire.executor.base import Executor, StepFuture

FLOPS, READ, WRITTEN = "flops", "read_bytes", "write_bytes"


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of one model on one device."""

    layers: int
    """Numbers of the weights that a token is multiplied with, of all layers."""
    head: int
    """Of what makes logits of it."""
    weight_bytes: int
    """That a step reads, without the head."""
    head_bytes: int
    kinds: tuple[tuple[CacheSpec, int], ...]
    """What layers keep, and how many of them."""
    num_heads: int

    @classmethod
    def of(
        cls, config: dict[str, Any], specs: Iterable[CacheSpec], weight_bytes: int, itemsize: int
    ) -> StepCosts:
        """`weight_bytes`: of the whole checkpoint in memory; `itemsize`: of a number that is not quantized."""
        kinds = tuple(Counter(specs).items())
        hidden = _first(config, "hidden_size", "n_embd", "d_model")
        heads = _first(config, "num_attention_heads", "n_head")
        head = hidden * _first(config, "vocab_size")
        mlp = hidden * _mlp(config, hidden)
        layers = sum(
            count * (mlp + hidden * (heads + spec.num_kv_heads) * (spec.head_dim + spec.v_head_dim))
            for spec, count in kinds
        )
        # A table of embeddings is looked up; tied to the head, it is the head that is read.
        table = 0 if config.get("tie_word_embeddings") else head * itemsize
        read = max(weight_bytes - table, 0)
        head_bytes = min(head * itemsize, read)
        return cls(layers, head, read - head_bytes, head_bytes, kinds, heads)

    def flops(self, item: WorkItem, start: int) -> float:
        """Of a row's share of a step; `start` tokens of it were computed before."""
        total = 2 * self.layers * item.num_tokens + 2 * self.head * item.samples
        for spec, count in self.kinds:
            seen = _looked_at(spec, start, item.num_tokens)
            total += count * 2 * self.num_heads * (spec.head_dim + spec.v_head_dim) * seen
        return float(total)

    def kv_bytes(self, item: WorkItem, start: int) -> tuple[float, float]:
        """Read and written."""
        read = written = 0
        for spec, count in self.kinds:
            each, end = count * spec.bytes_per_token, start + item.num_tokens
            read += each * (end - spec.first_needed(start))
            written += each * item.num_tokens
        return float(read), float(written)


def _first(config: dict[str, Any], *names: str) -> int:
    """Of the names that there are; the largest, where layers differ."""
    found = next((config[name] for name in names if config.get(name)), 0)
    return int(max(found) if isinstance(found, list | tuple) else found)


def _mlp(config: dict[str, Any], hidden: int) -> int:
    """Numbers of a layer's MLP for each of the hidden size: with experts, of those that a token goes to."""
    width = _first(config, "intermediate_size", "n_inner") or 4 * hidden
    if chosen := _first(config, "num_experts_per_tok"):
        width = _first(config, "moe_intermediate_size") or width
        width *= chosen + _first(config, "n_shared_experts")
    names = ("hidden_act", "hidden_activation", "activation_function")
    act = next((config[name] for name in names if config.get(name)), "silu")
    gated = act in ("silu", "swish", "gelu_pytorch_tanh")
    return width * (3 if gated else 2)


def _looked_at(spec: CacheSpec, start: int, num_tokens: int) -> int:
    """How many positions the tokens look at, all in all, each at itself too."""
    end, window = start + num_tokens, spec.window if isinstance(spec, WindowSpec) else 0
    if not window:
        return _up_to(end) - _up_to(start)
    grown = max(min(window, end), start)  # until there a token looks at all before it
    return _up_to(grown) - _up_to(start) + (end - grown) * window


def _up_to(length: int) -> int:
    return length * (length + 1) // 2


class MfuExecutor:
    """An executor whose steps are counted in `counts`, as they are launched."""

    def __init__(self, executor: Executor, costs: StepCosts):
        self._executor, self._costs = executor, costs
        self.recoverable = executor.recoverable
        self.counts = dict.fromkeys((FLOPS, READ, WRITTEN), 0.0)
        self._computed: dict[int, int] = {}  # by row

    def launch(self, plan: StepPlan) -> StepFuture:
        costs, counts = self._costs, self.counts
        for new in plan.entered:
            self._computed[new.row] = new.computed
        for item in plan.work:
            start = self._computed[item.row]
            self._computed[item.row] = start + item.num_tokens
            read, written = costs.kv_bytes(item, start)
            counts[FLOPS] += costs.flops(item, start)
            counts[READ] += read
            counts[WRITTEN] += written
        if plan.work:
            counts[READ] += costs.weight_bytes + costs.head_bytes * any(
                item.samples for item in plan.work
            )
        return self._executor.launch(plan)

    def call(self, name: str, *args: Any) -> list[Any]:
        return self._executor.call(name, *args)

    def close(self) -> None:
        self._executor.close()


def count(core: EngineCore, resolved: Resolved, specs: Iterable[CacheSpec]) -> None:
    """Have the core tell what its steps cost."""
    weights = forecast_weights(resolved, available=1 << 62)
    costs = StepCosts.of(resolved.hf_config, specs, weights, ITEMSIZE[resolved.dtype])
    core.executor = counted = MfuExecutor(core.executor, costs)
    core.counts = counted.counts
