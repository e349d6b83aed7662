"""What the CPU kernels support of a mixture layer: a router, experts, and maybe a shared expert.

Knows the parts of an `MoE`, and fills in the C struct `Mixture` (kernels/mixture.h).
"""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.decoder_layer import GatedMLP
from quire.layers.engine_experts import EngineExperts
from quire.layers.expert_parallel import PlacedExperts
from quire.layers.moe import Experts, MoE, Router
from quire.ops.cpu.experts import native_experts, native_routing, takes_router
from quire.ops.cpu.structs import CMixture, CWeight


def native_mixture(mlp: nn.Module) -> CMixture | None:
    """The struct; None: the kernels do not compute some part of it."""
    if type(mlp) is not MoE or type(mlp.gate) is not Router or type(mlp.experts) is not Experts:
        return None
    split, ranks = mlp.experts.split, None
    if isinstance(split, EngineExperts):
        return None  # the kernels do not ask other engines
    if split is not None and (ranks := split.ranks.link) is None:
        return None  # the kernels cannot exchange with these ranks
    gate, shared = mlp.gate, mlp.shared
    whole = gate.ref.dtype == torch.float32
    router: CWeight | None = CWeight()
    if not whole:
        router = gate.ref.kernel_weight(padded=True)
    elif gate.ref.lora is not None or not takes_router(gate.ref.weight, gate.ref.bias):
        return None
    routing = native_routing(gate.how._replace(rounds=gate.how.rounds and not whole))
    experts = native_experts(mlp.experts.of, gate.how.k)
    if router is None or routing is None or experts is None:
        return None
    if mlp.experts.on_input and gate.how.k > 1:
        return None
    native = CMixture(
        router=router, routing=routing, experts=experts, count=mlp.experts.num_experts, on_input=mlp.experts.on_input,
        ranks=ranks,
    )  # fmt: skip
    if isinstance(split, PlacedExperts):
        tables = split.first_E1, split.seats_S2, split.loads_E
        native.first_seat, native.seats, native.loads = (table.data_ptr() for table in tables)
    native.references = mlp, experts, routing
    if whole:
        bias = gate.ref.bias
        native.router_weight = gate.ref.weight.data_ptr()
        native.router_bias = None if bias is None else bias.data_ptr()
    if gate.correction is not None:
        native.correction = gate.get_parameter("correction_E").data_ptr()
    return native if shared is None or _fill_shared(mlp, shared, native) else None


def _fill_shared(mlp: MoE, shared: nn.Module, native: CMixture) -> bool:
    """Whether the kernels compute the shared expert."""
    if type(shared) is not GatedMLP:
        return False
    gate_up, down = shared.gate_up.ref.kernel_weight(), shared.down_proj.ref.kernel_weight()
    share: CWeight | None = CWeight()
    if mlp.shared_gate is not None:
        share = mlp.shared_gate.ref.kernel_weight(padded=True)
    prepared = shared.gate_up.ref.prepared
    if gate_up is None or down is None or share is None or prepared is None:
        return False
    native.shared_gate_up, native.shared_down, native.shared_gate = gate_up, down, share
    native.shared_act = prepared.kernel_act
    return True
