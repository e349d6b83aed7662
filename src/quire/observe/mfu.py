"""What each step costs in theory, for `--enable-mfu-metrics`: floating-point operations, and bytes of weights and KV.

Knows config.json, cache specs and plans. Does not know how long a step took. Divided by time and a device's peak rate,
the numbers show how much of the device is used. Only products are counted: two operations for each element of a weight,
and of each key and value that is attended to. Activations mostly stay in caches and are not counted.

    operations   2 x (elements of the weights) x tokens  +  2 x heads x (sizes of key and value) x attended positions
    read         the weights once a step                 +  keys and values once for each request
    written      keys and values of the step's tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire.config.model_sizes import model_size
from quire.kvcache.specs import CacheSpec, CrossAttentionSpec, WindowSpec
from quire.protocol.plan import StepPlan, StepResult, WorkItem

FLOPS, READ, WRITTEN = "flops", "read_bytes", "write_bytes"


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The cost model of one model on one device."""

    layers: int
    """Elements of the weights, in all layers, that each token is multiplied with."""
    head: int
    """Elements of the head, which computes the logits."""
    weight_bytes: int
    """Bytes of weights that a step reads, without the head."""
    head_bytes: int
    kinds: tuple[tuple[CacheSpec, int], ...]
    """Each cache spec, and how many layers have it."""
    num_heads: int

    @classmethod
    def of(
        cls, config: dict[str, Any], specs: Iterable[CacheSpec], weight_bytes: int, itemsize: int
    ) -> StepCosts:
        """`weight_bytes`: of the whole checkpoint in memory; `itemsize`: of an unquantized element."""
        kinds = tuple(Counter(specs).items())
        hidden = model_size(config, "hidden_size")
        heads = model_size(config, "num_attention_heads")
        head = hidden * model_size(config, "vocab_size")
        mlp = hidden * _mlp(config, hidden)
        layers = sum(
            count * (mlp + hidden * (heads + spec.num_kv_heads) * (spec.head_dim + spec.v_head_dim))
            for spec, count in kinds
        )
        # A step reads only a few rows of the embedding table. If it is tied to the head, it is read as the head.
        table = 0 if config.get("tie_word_embeddings") else head * itemsize
        read = max(weight_bytes - table, 0)
        head_bytes = min(head * itemsize, read)
        return cls(layers, head, read - head_bytes, head_bytes, kinds, heads)

    def flops(self, item: WorkItem, start: int) -> float:
        """Operations for a row's part of a step; `start` of its tokens were computed before."""
        total = 2 * self.layers * item.num_tokens + 2 * self.head * item.samples
        for spec, count in self.kinds:
            seen = _looked_at(spec, start, item.num_tokens)
            total += count * 2 * self.num_heads * (spec.head_dim + spec.v_head_dim) * seen
        return float(total)

    def kv_bytes(self, item: WorkItem, start: int) -> tuple[float, float]:
        """(bytes read, bytes written)"""
        read = written = 0
        for spec, count in self.kinds:
            each, end = count * spec.bytes_per_token, start + item.num_tokens
            if isinstance(spec, CrossAttentionSpec):
                read += each * spec.max_encoder_len
                continue
            read += each * (end - spec.first_needed(start))
            written += each * item.num_tokens
        return float(read), float(written)


def _mlp(config: dict[str, Any], hidden: int) -> int:
    """Elements of one layer's MLP, divided by the hidden size; with experts, only those that a token uses."""
    width = model_size(config, "intermediate_size", 4 * hidden)
    if chosen := model_size(config, "num_experts_per_tok"):
        width = model_size(config, "moe_intermediate_size") or width
        width *= chosen + model_size(config, "n_shared_experts")
    names = ("hidden_act", "hidden_activation", "activation_function")
    act = next((config[name] for name in names if config.get(name)), "silu")
    gated = act in ("silu", "swish", "gelu_pytorch_tanh")
    return width * (3 if gated else 2)


def _looked_at(spec: CacheSpec, start: int, num_tokens: int) -> int:
    """How many positions the tokens attend to in total, each token's own included; of an encoder's states, at most."""
    if isinstance(spec, CrossAttentionSpec):
        return num_tokens * spec.max_encoder_len
    end, window = start + num_tokens, spec.window if isinstance(spec, WindowSpec) else 0
    if not window:
        return _up_to(end) - _up_to(start)
    grown = max(min(window, end), start)  # up to here a token attends to all before it
    return _up_to(grown) - _up_to(start) + (end - grown) * window


def _up_to(length: int) -> int:
    return length * (length + 1) // 2


class StepCostCounter:
    """A StepObserver that adds the cost of each step to `counts`."""

    def __init__(self, costs: StepCosts, counts: dict[str, float]):
        self._costs, self._counts = costs, counts
        counts |= dict.fromkeys((FLOPS, READ, WRITTEN), 0.0)
        self._computed: dict[int, int] = {}  # by row

    def launched(self, plan: StepPlan) -> None:
        costs, counts = self._costs, self._counts
        for new in plan.entered:
            self._computed[new.row] = new.num_computed_tokens
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

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        """The plan says it all."""
