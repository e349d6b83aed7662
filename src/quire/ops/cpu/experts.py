"""Mixture layers by the CPU kernels: the choice of experts, and their sum in one call; and products of heads with weights of
their own. Else the definition runs.

Knows the C structs of kernels/route.h and experts.h. Does not know how a weight is stored: it describes itself.

Shape suffixes: as in `ops/experts.py`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from quire.ops import experts as definitions
from quire.ops.cpu.bindings import best
from quire.ops.cpu.structs import ACTIVATIONS, CExperts, CRouting, CWeight
from quire.ops.experts import ExpertWeights, HeadWeights, Routing

SCORES = ("softmax", "sigmoid", "logits")
"""`Score` in kernels/route.h."""


@functools.lru_cache
def native_routing(how: Routing) -> CRouting | None:
    """None: the kernels do not choose like this."""
    if how.jitter:
        return None
    return CRouting(
        how.k, SCORES.index(how.score), how.renormalize, how.rounds, how.groups, how.top_groups,
        how.group_score == "top2", how.eps, how.scale,
    )  # fmt: skip


@definitions.route.on("native")
def _route(logits_TE: Tensor, bias_E: Tensor | None, how: Routing) -> tuple[Tensor, Tensor]:
    kernels, native = best(), native_routing(how)
    # In another dtype, weights would be rounded in another way.
    if kernels is None or native is None or (how.rounds and logits_TE.dtype != torch.bfloat16):
        return definitions.route.reference(logits_TE, bias_E, how)
    tokens, count = logits_TE.shape
    logits_TE = logits_TE.float().contiguous()
    ids_TK = torch.empty(tokens, how.k, dtype=torch.int64)
    weights_TK = torch.empty(tokens, how.k)
    kernels.route(
        logits_TE.data_ptr(), None if bias_E is None else bias_E.data_ptr(), ctypes.addressof(native), tokens, count,
        ids_TK.data_ptr(), weights_TK.data_ptr(),
    )  # fmt: skip
    return ids_TK, weights_TK


@definitions.router_logits.on("native")
def _router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    kernels, (experts, size) = best(), weight_ED.shape
    fits = x_TD.dtype == torch.bfloat16 and x_TD.stride(-1) == 1 and takes_router(weight_ED, bias_E)
    if kernels is None or not fits:
        return definitions.router_logits.reference(x_TD, weight_ED, bias_E)
    y_TE, bias = torch.empty(len(x_TD), experts), None if bias_E is None else bias_E.data_ptr()
    kernels.router_logits(
        x_TD.data_ptr(), x_TD.stride(0), weight_ED.data_ptr(), bias, y_TE.data_ptr(), len(x_TD), experts, size
    )  # fmt: skip
    return y_TE


def takes_router(weight_ED: Tensor, bias_E: Tensor | None) -> bool:
    """Whether the kernel of float32 routers takes this weight and bias."""
    whole = all(x is None or x.dtype == torch.float32 for x in (weight_ED, bias_E))
    return whole and weight_ED.shape[1] % 16 == 0 and weight_ED.is_contiguous()


def native_experts(expert_weights: ExpertWeights, chosen: int) -> CExperts | None:
    """The struct of a layer's experts, kept in `of.prepared`; None: the kernels do not multiply some weight.

    Args:
        chosen: experts of a token.
    """
    first: Any = expert_weights.gate_up[0]
    prepared = getattr(first, "prepared", None)
    if prepared is None:
        return None
    if expert_weights.prepared is not None and expert_weights.prepared.references[0] is prepared:
        found: CExperts = expert_weights.prepared
        found.chosen = chosen
        return found
    refs: list[Any] = [*expert_weights.gate_up, *expert_weights.down]
    weights = [ref.kernel_weight() for ref in refs]
    if any(weight is None for weight in weights):
        return None
    count = len(expert_weights.down)
    gate_up, down = (CWeight * count)(*weights[:count]), (CWeight * count)(*weights[count:])
    found = CExperts(
        ctypes.addressof(gate_up), ctypes.addressof(down), count, chosen, weights[0].ins, ACTIVATIONS[expert_weights.act]
    )  # fmt: skip
    found.references = prepared, gate_up, down
    expert_weights.prepared = found
    return found


@definitions.experts.on("native")
def _experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert_weights: ExpertWeights
) -> Tensor:
    kernels, fits = best(), x_TD.dtype == torch.bfloat16 and x_TD.stride(-1) == 1
    native = (
        native_experts(expert_weights, ids_TK.shape[1]) if kernels is not None and fits else None
    )
    if kernels is None or native is None or not len(x_TD):
        return definitions.experts.reference(x_TD, ids_TK, weights_TK, expert_weights)
    y_TD = torch.empty(x_TD.shape, dtype=torch.bfloat16)
    ids_TK, weights_TK = ids_TK.contiguous(), weights_TK.contiguous()
    kernels.experts(
        ctypes.addressof(native), x_TD.data_ptr(), x_TD.stride(0), ids_TK.data_ptr(), weights_TK.data_ptr(),
        y_TD.data_ptr(), len(x_TD),
    )  # fmt: skip
    return y_TD


@definitions.expert_products.on("native")
def _expert_products(
    x_ND: Tensor, ids_P: Tensor, expert_weights: ExpertWeights, down: bool
) -> Tensor:
    kernels, fits = best(), x_ND.dtype == torch.bfloat16 and x_ND.stride(-1) == 1
    native = native_experts(expert_weights, 1) if kernels is not None and fits else None
    if kernels is None or native is None or not len(ids_P):
        return definitions.expert_products.reference(x_ND, ids_P, expert_weights, down)
    _, gate_up, downs = native.references
    outs = downs[0].outs if down else gate_up[0].outs // (1 if expert_weights.act == "relu2" else 2)
    y_PD = torch.empty(len(ids_P), outs, dtype=torch.bfloat16)
    ids_P = ids_P.contiguous()
    kernels.expert_products(
        ctypes.addressof(native), down, x_ND.data_ptr(), x_ND.stride(0), len(x_ND), ids_P.data_ptr(), len(ids_P),
        y_PD.data_ptr(), outs,
    )  # fmt: skip
    return y_PD


@definitions.weighted_sum.on("native")
def _weighted_sum(y_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    kernels, (tokens, chosen, size) = best(), y_TKD.shape
    fits = y_TKD.dtype == torch.bfloat16 and y_TKD.is_contiguous() and size % 16 == 0
    if kernels is None or not fits:
        return definitions.weighted_sum.reference(y_TKD, weights_TK)
    y_TD, weights_TK = torch.empty(tokens, size, dtype=torch.bfloat16), weights_TK.contiguous()
    kernels.weighted_sum(
        y_TKD.data_ptr(), None, weights_TK.data_ptr(), y_TD.data_ptr(), tokens, chosen, size
    )
    return y_TD


@definitions.per_head.on("native")
def _per_head(x_THI: Tensor, head_weights: HeadWeights) -> Tensor:
    kernels, weights = best(), native_heads(head_weights)
    if kernels is None or weights is None or x_THI.dtype != torch.bfloat16 or x_THI.stride(2) != 1:
        return definitions.per_head.reference(x_THI, head_weights)
    tokens, heads, _ = x_THI.shape
    y_THO = torch.empty((tokens, heads, weights[0].outs), dtype=torch.bfloat16)
    kernels.per_head(
        ctypes.addressof(weights), heads, x_THI.data_ptr(), x_THI.stride(0), x_THI.stride(1), y_THO.data_ptr(),
        y_THO.stride(0), y_THO.stride(1), tokens,
    )  # fmt: skip
    return y_THO


def native_heads(head_weights: HeadWeights) -> Any:
    """The structs of all heads, kept in `of.prepared`; None: the kernels do not multiply some weight."""
    first: Any = head_weights.weights[0]
    prepared = getattr(first, "prepared", None)
    if prepared is None:
        return None
    if head_weights.prepared is None or head_weights.prepared[0] is not prepared:
        refs: list[Any] = [*head_weights.weights]
        weights = [ref.kernel_weight() for ref in refs]
        if any(weight is None for weight in weights):
            return None
        head_weights.prepared = prepared, (CWeight * len(weights))(*weights)
    return head_weights.prepared[1]


@definitions.add_shared.on("native")
def _add_shared(y_TD: Tensor, shared_TD: Tensor, gate_T1: Tensor | None) -> Tensor:
    kernels, tokens, size = best(), *y_TD.shape
    given = [y_TD, shared_TD] if gate_T1 is None else [y_TD, shared_TD, gate_T1]
    fits = all(each.dtype == torch.bfloat16 for each in given) and size % 16 == 0
    if kernels is None or not fits or not (y_TD.is_contiguous() and shared_TD.is_contiguous()):
        return definitions.add_shared.reference(y_TD, shared_TD, gate_T1)
    gate, step = (None, 0) if gate_T1 is None else (gate_T1.data_ptr(), gate_T1.stride(0))
    kernels.add_shared(y_TD.data_ptr(), shared_TD.data_ptr(), gate, step, tokens, size)
    return y_TD
