"""Fused decoder layers on the CPU: consecutive sublayers, and the norm after them, in one kernel call.

Knows which sublayers (attention, MLP) the kernels support (`fused_layers.py`). The others run as modules between the calls,
so a layer with another MLP keeps its fused attention, and one with another attention keeps its fused MLP. A fused sublayer
gives the same bits as its modules.

Shape suffixes: T tokens, D features, P pairs of features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.forward_context import KEPT_STATES, current_adapters, current_batch
from quire.layers.attention import Attention
from quire.layers.decoder import Decoder
from quire.layers.decoder_layer import QueryScale, normed_sum
from quire.layers.encoder import EncoderStack
from quire.layers.native_parts import layer_parts
from quire.layers.rotary import Angles, LayerRotaries
from quire.native.fused_encoder import fuse_encoder
from quire.native.fused_layers import has_attention, has_mlp, native_layer, native_norm
from quire.ops.cpu.bindings import Kernels, best
from quire.ops.cpu.structs import CLayer, CNorm, CStep
from quire.parallel.ranks import RankGroup

_P, _L = ctypes.c_void_p, ctypes.c_int64


def fuse_model(model: object) -> None:
    """Fuse what the kernels support of the model's decoder or encoder. Its KV cache must be bound and not move."""
    unfuse_model(model)
    kernels = best()
    if kernels is None or not isinstance(model, nn.Module):
        return
    for decoder in model.modules():
        if isinstance(decoder, EncoderStack):
            fuse_encoder(decoder, kernels)
        if isinstance(decoder, Decoder):
            rotaries: list[Any] = [decoder.rotary.kinds[k] for k in decoder.rotary.kind_of_layer]
            native_layers = [
                native_layer(layer, len(rotary.frequencies_P))
                for layer, rotary in zip(decoder.layers, rotaries, strict=True)
            ]
            if any(has_attention(layer) or has_mlp(layer) for layer in native_layers):
                decoder.layers.fused = FusedDecoder(decoder, native_layers, kernels)


def unfuse_model(model: object) -> None:
    """Undo `fuse_model`, so that each module is called."""
    if isinstance(model, nn.Module):
        for decoder in model.modules():
            if isinstance(decoder, Decoder):
                decoder.layers.fused = None
            if isinstance(decoder, EncoderStack):
                decoder.fused = None


class StepGroup(NamedTuple):
    """Layers that share a block table, a rotary embedding and a scale of queries."""

    kv_group: int
    rotary: int  # among `LayerRotaries.kinds`
    query_scale: QueryScale | None


@cache
def query_scales(scale: QueryScale, length: int) -> Tensor:
    """The factors at the first positions, rounded as queries are."""
    return scale(torch.arange(length)).bfloat16().float()


class ForwardPass:
    """What the layers of one forward pass share: C structs by group, and angles by layer."""

    def __init__(
        self, groups: Mapping[StepGroup, Attention], positions: Tensor, rotary: LayerRotaries
    ):
        self.positions, self.rotary = positions, rotary
        numbers_T = current_adapters(positions)
        self.references: list[Any] = [numbers_T]
        self.adapters = None if numbers_T is None else numbers_T.data_ptr()
        self.steps = (_P * len(groups))(*(self._step(*group) for group in groups.items()))

    @cached_property
    def angles(self) -> list[Angles]:
        """By layer, for those that run as modules."""
        angles: list[Angles] = self.rotary(self.positions)
        return angles

    def _step(self, group: StepGroup, attend: Attention) -> int:
        """The address of a struct. Its angles are a table by position, if that has all positions of the step."""
        rotary: Any = self.rotary.kinds[group.rotary]
        positions_T: Tensor | None = None
        angles, scales, query_scale = rotary.table(), None, group.query_scale
        if self.positions.ndim == 1 and current_batch().max_length <= len(angles[0]):
            positions_T = self.positions
            if query_scale is not None:
                scales = query_scales(query_scale, len(angles[0]))
        else:
            angles = rotary(self.positions)
            if query_scale is not None:
                scales = query_scale(current_batch().positions_T).bfloat16().float()
        cos_TP, sin_TP = (part.float().contiguous() for part in angles)
        meta, rows_B = attend.step_metadata(), current_batch().rows_B
        kept_T = current_batch().extras.get(KEPT_STATES)
        step = CStep(
            cos_TP.data_ptr(), sin_TP.data_ptr(), None if scales is None else scales.data_ptr(),
            None if positions_T is None else positions_T.data_ptr(),
            meta.slots_T.data_ptr(), rows_B.data_ptr(), None if kept_T is None else kept_T.data_ptr(), meta.table_BN.data_ptr(), meta.starts_B1.data_ptr(), meta.lengths_B.data_ptr(),
            len(meta.slots_T), meta.rows, meta.table_BN.shape[1], cos_TP.shape[1],
        )  # fmt: skip
        self.references += [step, cos_TP, sin_TP, scales, rows_B, kept_T]
        return ctypes.addressof(step)


Part = Callable[[ForwardPass, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""A part of the decoder, from (x_TD, residual_TD) to the next part's."""


class NativeRun:
    """Consecutive sublayers in one call, and the last norm if it is given. It overwrites x and the residual."""

    def __init__(
        self,
        kernels: Kernels,
        layers: Sequence[tuple[CLayer, int]],
        norm: CNorm | None,
        ranks: RankGroup | None,
    ):
        self.kernels, self.norm, self.count, self.ranks = kernels, norm, len(layers), ranks
        self.structs = [layer for layer, _ in layers]
        self.layers = (_P * self.count)(*(ctypes.addressof(layer) for layer in self.structs))
        self.groups = (_L * self.count)(*(group for _, group in layers))

    def __call__(
        self, forward: ForwardPass, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        first = residual_TD is None
        residual_TD = torch.empty_like(x_TD) if residual_TD is None else residual_TD
        norm = None if self.norm is None else ctypes.addressof(self.norm)
        self.kernels.layers(
            self.layers, self.groups, self.count, forward.steps, len(x_TD), forward.adapters, x_TD.data_ptr(),
            residual_TD.data_ptr(), first, norm,
        )  # fmt: skip
        if self.ranks is not None:
            self.ranks.check()
        return x_TD, residual_TD


class FusedDecoder:
    """A decoder's layers and its last norm, if it has the last layer, as native runs with modules between them."""

    def __init__(self, decoder: Decoder, native_layers: Sequence[CLayer], kernels: Kernels):
        self.is_last = decoder.stage.is_last
        self.layers, self.norm, self.kernels = decoder.layers, decoder.norm, kernels
        self.ranks = decoder.ranks
        self.structs: list[tuple[Any, CLayer]] = list(
            zip(decoder.layers, native_layers, strict=True)
        )
        self.groups: dict[StepGroup, Attention] = {}  # one attention of each
        self.group_of_layer = []
        for (layer, native), rotary in zip(self.structs, decoder.rotary.kind_of_layer, strict=True):
            number = 0
            if native.qkv.data is not None and (parts := layer_parts(layer)) is not None:
                attention: Any = parts.attention
                group = StepGroup(attention.attn.kv_group, rotary, attention.query_scale)
                self.groups.setdefault(group, attention.attn)
                number = list(self.groups).index(group)
            self.group_of_layer.append(number)
        if not self.groups:  # nothing says where the rows of a step are
            for _, native in self.structs:
                native.delta_net = native.mamba2_mixer = None
        self.parts: dict[frozenset[int], list[Part]] = {}

    @property
    def whole(self) -> NativeRun | None:
        """The one run that has all layers and the norm, if there is one."""
        parts = self._parts(frozenset())
        only = parts[0]
        return only if len(parts) == 1 and isinstance(only, NativeRun) else None

    def run(
        self, x_TD: Tensor, residual_TD: Tensor | None, positions: Tensor, rotary: LayerRotaries
    ) -> tuple[Tensor, Tensor | None]:
        """As `Layers.advance`, and the last norm if the layers are the last; overwrites both."""
        forward = ForwardPass(self.groups, positions, rotary)
        for part in self._parts(self.layers.recorded):
            x_TD, residual_TD = part(forward, x_TD, residual_TD)
        return x_TD, residual_TD

    def _parts(self, recorded: frozenset[int]) -> list[Part]:
        if recorded not in self.parts:
            self.parts[recorded] = self._build(recorded)
        return self.parts[recorded]

    def _build(self, recorded: frozenset[int]) -> list[Part]:
        """The parts in order. A run ends where hidden states are recorded."""
        parts: list[Part] = []
        run: list[tuple[CLayer, int]] = []

        def call(*modules: Part, norm: CNorm | None = None) -> None:
            if run:
                parts.append(NativeRun(self.kernels, list(run), norm, self.ranks))
                run.clear()
            parts.extend(modules)

        for number, (layer, native) in enumerate(self.structs):
            if number in recorded:
                call(partial(self._record, number))
            declared = layer_parts(layer) if has_attention(native) or has_mlp(native) else None
            if not has_attention(native):
                call(
                    partial(_call, layer if declared is None else layer.attention_sublayer, number)
                )
            if declared is None:
                continue
            run.append((native, self.group_of_layer[number]))
            if not has_mlp(native):
                call(partial(_call, layer.mlp_sublayer, None))
            if declared.finish is not None:
                call(partial(_call, declared.finish, None))
        if len(self.layers) in recorded:
            call(partial(self._record, len(self.layers)))
        if not self.is_last:
            call()
        elif run and (norm := native_norm(self.norm)) is not None:
            call(norm=norm)
        else:
            call(self._norm)
        return parts

    def _record(
        self, number: int, forward: ForwardPass, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        self.layers.record(number, x_TD, residual_TD)
        return x_TD, residual_TD

    def _norm(
        self, forward: ForwardPass, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return normed_sum(self.norm, x_TD, residual_TD)[0], None


def _call(
    module: Callable[..., tuple[Tensor, Tensor]], number: int | None,
    forward: ForwardPass, x_TD: Tensor, residual_TD: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Call a layer, or a sublayer; `number`: of the layer whose angles it takes."""
    angles = () if number is None else (forward.angles[number],)
    x_TD, residual_TD = module(x_TD, residual_TD, *angles)
    return _checked(x_TD), _checked(residual_TD)


def _checked(x_TD: Tensor) -> Tensor:
    """The tensor, contiguous. Raises TypeError: it is not bfloat16, which the kernels read."""
    if x_TD.dtype != torch.bfloat16:
        raise TypeError(f"a module between fused layers returned {x_TD.dtype}, not torch.bfloat16")
    return x_TD.contiguous()
