"""What the CPU kernels support of a `Mamba2Mixer` with an allocated state.

Knows its parts, and fills in the C struct `Mamba2Mixer` (kernels/mamba2_mixer.h).
"""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.recurrent import Mamba2Mixer
from quire.ops.cpu.structs import CMamba2Mixer
from quire.ops.recurrent import TILE


def native_mamba2_mixer(mixer: nn.Module) -> CMamba2Mixer | None:
    """The struct; None: the kernels do not compute some part of it."""
    if type(mixer) is not Mamba2Mixer or not mixer.state or mixer.norm is None:
        return None
    if mixer.norm_ranks is not None or mixer.scales is not None:
        return None
    (state, conv_state), conv, norm, sizes = mixer.state, mixer.conv1d, mixer.norm, mixer.sizes
    if not 2 <= conv.taps <= 4 or any(
        n % TILE for n in (sizes.states, sizes.head_size, norm.group)
    ):
        return None
    first, conv_bias = mixer.in_proj.ref, conv._parameters.get("bias")
    weights = first.kernel_weight(padded=first.bias is None), mixer.out_proj.ref.kernel_weight()
    plain = [x for x in (conv.weight, conv_bias, norm.weight, conv_state) if x is not None]
    if None in weights or any(x.dtype != torch.bfloat16 or x.stride(-1) != 1 for x in plain):
        return None
    floats = [None if conv_bias is None else conv_bias.data_ptr(), norm.weight.data_ptr()]
    floats += [x.data_ptr() for x in (mixer.dt_bias, mixer.A_log, mixer.D, conv_state, state)]
    native = CMamba2Mixer(
        *weights, conv.weight.data_ptr(), *floats, conv_state.stride(0), state.stride(0), sizes.groups, sizes.states,
        sizes.heads, sizes.head_size, conv.taps, mixer.own.start, norm.group, norm.gate_first, *mixer.limits, norm.eps,
    )  # fmt: skip
    native.references = mixer, state, conv_state
    return native
