"""Mixture layers in plain torch: the choice of experts, and their sum; products by head. The definition that tests compare kernels
with.

Knows arithmetic. Does not know layers, or how weights are stored. A token's result does not depend on the other tokens.

Sources: Mixtral (arXiv 2401.04088), DeepSeek-V2 and V3 (2405.04434, 2412.19437), SparseMixer (2409.12136).

Shape suffixes: T tokens, D features, E experts, K experts of a token, P = T * K pairs of a token and an expert, N rows, I inner
features, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.dispatch import op
from quire.ops.reference import linear, sigmoid


class Routing(NamedTuple):
    """How a router chooses experts and weighs them.

    `k`: experts of a token. `score`: "softmax" or "sigmoid" of the logits, or "logits". `renormalize`: the weights of
    the chosen are divided by their sum plus `eps`; with score "logits", they are a softmax over the chosen, or without
    `renormalize` their sigmoid. `scale` multiplies the weights. `rounds`: the weights are rounded to the model's dtype.
    `groups`: only experts of the `top_groups` best groups can be chosen. `group_score`: "max" of the group, or the sum of
    its "top2". `jitter`: see `sparsemixer`, which is used if it is not 0.
    """

    k: int
    score: str = "softmax"
    renormalize: bool = True
    eps: float = 0.0
    scale: float = 1.0
    rounds: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    jitter: float = 0.0


@op
def router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """logits_TE of a router in float32."""
    return linear(x_TD.float(), weight_ED, bias_E)


@op
def route(logits_TE: Tensor, bias_E: Tensor | None, how: Routing) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights: ids_TK int64, weights_TK float32.

    Of equal scores, the expert with the lower number comes first. bias_E changes the choice, not the weights.
    """
    s_TE = logits_TE.float()
    if how.jitter:
        return sparsemixer(s_TE, how)
    if how.score == "softmax":
        s_TE = s_TE.softmax(-1)
    elif how.score == "sigmoid":
        s_TE = sigmoid(s_TE)
    choice_TE = s_TE if bias_E is None else s_TE + bias_E
    if how.groups > how.top_groups:
        choice_TE = _of_the_best_groups(choice_TE, how)
    ids_TK = _best(choice_TE, how.k)
    w_TK = s_TE.gather(-1, ids_TK)
    if how.score == "logits":
        w_TK = w_TK.softmax(-1) if how.renormalize else sigmoid(w_TK)
    elif how.renormalize:
        w_TK = w_TK / (w_TK.sum(-1, keepdim=True) + how.eps)
    w_TK = w_TK * how.scale
    return ids_TK, w_TK.to(logits_TE.dtype).float() if how.rounds else w_TK


def _best(values_TN: Tensor, count: int) -> Tensor:
    """Indices of the largest values; the lower index first among equals."""
    return values_TN.sort(stable=True, dim=-1, descending=True).indices[..., :count]


def _of_the_best_groups(choice_TE: Tensor, how: Routing) -> Tensor:
    """The scores, lowered where the group is not chosen: to -inf with "top2", to 0 with "max" (DeepSeek-V2)."""
    by_group = choice_TE.unflatten(-1, (how.groups, -1))
    top2 = how.group_score == "top2"
    score_TG = (
        by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1) if top2 else by_group.amax(-1)
    )
    others_TG = torch.ones_like(score_TG, dtype=torch.bool)
    others_TG.scatter_(-1, _best(score_TG, how.top_groups), False)
    return by_group.masked_fill(others_TG[..., None], float("-inf") if top2 else 0.0).flatten(-2)


def sparsemixer(s_TE: Tensor, how: Routing) -> tuple[Tensor, Tensor]:
    """Phi-3.5-MoE: k times the best expert, with its softmax over the experts near it, which is then left out.

    Near: (best - score) / max(|score|, best) is at most 2 * jitter.
    """
    left_TE, ids, weights = s_TE, [], []
    for _ in range(how.k):
        id_T1 = left_TE.argmax(-1, keepdim=True)
        best_T1 = left_TE.gather(-1, id_T1)
        far_TE = (best_T1 - s_TE) / s_TE.abs().clamp(min=best_T1) > 2 * how.jitter
        ids.append(id_T1)
        weights.append(left_TE.masked_fill(far_TE, float("-inf")).softmax(-1).gather(-1, id_T1))
        left_TE = left_TE.scatter(-1, id_T1, float("-inf"))
    return torch.cat(ids, -1), torch.cat(weights, -1)


class Multiplies(Protocol):
    """A weight (`layers/weights.py`)."""

    def multiply(self, x_TI: Tensor) -> Tensor: ...


class CodedWeight(NamedTuple):
    """The tensors of a quantized weight [O, I], for the grouped products of an accelerator.

    `data`: int8 codes [O, I] with `scale` [O]; or, with a `step`, integers as `triton/wna16_gemm.packed` has them, with `scale` and
    `zero` [G, O].
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None = None
    bits: int = 8
    step: int = 0


@dataclass(eq=False, slots=True)
class ExpertWeights:
    """The weights of the experts of one layer, by number.

    Attributes:
        gate_up: gate and up, concatenated; or up alone.
        down: from the inner size back to D.
        act: the activation. The products of gated weights include it; relu2 (the square of ReLU) has no gate.
        prepared: what an implementation keeps of the weights; it may set it at the first call.
    """

    gate_up: Sequence[Multiplies]
    down: Sequence[Multiplies]
    act: str = "silu"
    prepared: Any = None


@op
def expert_products(
    x_ND: Tensor, ids_P: Tensor, expert_weights: ExpertWeights, down: bool
) -> Tensor:
    """y_PD: of each pair of a token and an expert, the product of the token with the expert's gate and up, and the activation;
    with `down`, the product with its down.

    Pair p has row p * N // P of x. Rows of ids outside of the experts are zeros.
    """
    each, y_PD = len(ids_P) // max(len(x_ND), 1), None
    for expert, weight in enumerate(expert_weights.down if down else expert_weights.gate_up):
        (pairs,) = (ids_P == expert).nonzero(as_tuple=True)
        if len(pairs):
            some = weight.multiply(x_ND[pairs // each])
            some = F.relu(some).square() if expert_weights.act == "relu2" and not down else some
            y_PD = some.new_zeros(len(ids_P), some.shape[1]) if y_PD is None else y_PD
            y_PD[pairs] = some
    return x_ND.new_zeros(len(ids_P), x_ND.shape[1]) if y_PD is None else y_PD


@op
def weighted_sum(y_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """y_TD: the sum of each token's rows times their weights, in float32, in their order."""
    sum_TD = torch.zeros_like(y_TKD[:, 0], dtype=torch.float32)
    for place in range(weights_TK.shape[1]):
        sum_TD += y_TKD[:, place] * weights_TK[:, place, None]
    return sum_TD.to(y_TKD.dtype)


@op
def experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert_weights: ExpertWeights
) -> Tensor:
    """y_TD: the sum of each token's experts times their weights, in float32, in the router's order.

    Each expert's output is rounded to x's dtype before it is weighed. ids outside of the experts add nothing.
    """
    ids_P = ids_TK.flatten()
    inner_PI = expert_products.reference(x_TD, ids_P, expert_weights, False)
    y_PD = expert_products.reference(inner_PI, ids_P, expert_weights, True)
    return weighted_sum.reference(y_PD.view(*ids_TK.shape, y_PD.shape[1]), weights_TK)


@dataclass(eq=False, slots=True)
class HeadWeights:
    """A weight for each head; `prepared`: as of `ExpertWeights`."""

    weights: Sequence[Multiplies]
    prepared: Any = None


@op
def per_head(x_THI: Tensor, head_weights: HeadWeights) -> Tensor:
    """y_THO: each head's features times the head's own weight transposed."""
    return torch.stack([ref.multiply(x_THI[:, h]) for h, ref in enumerate(head_weights.weights)], 1)


@op
def add_shared(y_TD: Tensor, shared_TD: Tensor, gate_T1: Tensor | None) -> Tensor:
    """y plus a shared expert's output, times the sigmoid of the gate. Implementations may overwrite y."""
    if gate_T1 is not None:
        shared_TD = sigmoid(gate_T1).to(shared_TD.dtype) * shared_TD
    return y_TD + shared_TD
