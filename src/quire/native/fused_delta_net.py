"""What the CPU kernels support of a gated delta net with an allocated state.

Knows the parts of a `GatedDeltaNet`, and fills in the C struct `DeltaNet` (kernels/delta_net.h).
"""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.recurrent import GatedDeltaNet
from quire.ops.cpu.structs import CDeltaNet
from quire.ops.recurrent import TILE


def native_delta_net(net: nn.Module) -> CDeltaNet | None:
    """The struct; None: the kernels do not compute some part of it."""
    if type(net) is not GatedDeltaNet or not net.state or net.K % TILE or net.V % TILE:
        return None
    (state, conv_state), conv, norm = net.state, net.conv1d, net.norm
    first = (net.in_proj_qkvz, net.in_proj_ba) if net.interleaved else (net.in_proj, net.in_gates)
    weights = [
        first[0].ref.kernel_weight(), first[1].ref.kernel_weight(padded=True), net.out_proj.ref.kernel_weight()
    ]  # fmt: skip
    plain = [conv.weight, norm.weight, conv_state]
    if any(weight is None for weight in weights) or not 2 <= conv.taps <= 4:
        return None
    if any(tensor.dtype != torch.bfloat16 for tensor in plain) or not conv.weight.is_contiguous():
        return None
    native = CDeltaNet(
        *weights,
        *(x.data_ptr() for x in (conv.weight, norm.weight, net.dt_bias, net.A_log, conv_state, state)),
        conv_state.stride(0), state.stride(0), net.key_heads, net.K, net.heads, net.V, conv.taps,
        net.own.start, net.own.total, net.all_key_heads, net.interleaved, norm.eps,
    )  # fmt: skip
    native.references = net, state, conv_state
    return native
