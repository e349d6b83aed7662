"""The structs that Python fills and the CPU kernels read: ctypes mirrors of the C++ ones, compared when a library loads.

Knows names, types and the order of fields. Does not know what they mean: kernels/layer.h, encoder.h, exchange.h, route.h, experts.h, step.h and sampling.h say so.
A field that is added on one side alone, or in another place, refuses the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_double, c_float, c_int64, c_uint32, c_void_p
from typing import Any, ClassVar


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


ACTIVATIONS = {
    "silu": 1,
    "gelu": 2,
    "gelu_pytorch_tanh": 3,
    "clamped_swiglu": 4,
    "relu2": 5,
    "relu": 7,
}
"""Numbers of the activations of gated layers, and of relu2 and relu (`Activation` in kernels/common.h); 0: none."""
AFTER = {**ACTIVATIONS, "quick_gelu": 8}
"""The same, and an activation that no gated layer has."""
UNGATED_FROM = 16
"""Added to the number of an activation without a gate."""

HALVES = 6
"""The number for both halves of a gated layer's product, without an activation."""


RANK_LATE, RANK_ENDED, RANK_STOPPED = 1, 2, 3
"""Why an exchange failed (`RankFault` in kernels/exchange.h); 0: it did not."""

RMS, RMS_PLUS_ONE, LAYER_NORM = 1, 2, 3
"""Numbers of the norms (`NormKind` in kernels/norm_rope_act.h); 0: no norm."""


class CWeight(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(c_void_p, "data scale sum zero codes order blocks bias"),
        *_all(c_int64, "outs ins group"),
        *_all(c_void_p, "lora x_ranks y_ranks"),
    ]


class CRankLink(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        ("memory", c_void_p),
        *_all(c_int64, "rank size slot timeout_ms lost fault"),
    ]


class CRouting(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(c_int64, "k score renormalize rounds groups top_groups top2"),
        *_all(c_float, "eps scale"),
    ]


class CExperts(ctypes.Structure):
    """`references` keeps references to what it points to."""

    references: Any
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(c_void_p, "gate_up down"),
        *_all(c_int64, "count chosen hidden act"),
    ]


class CNorm(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        ("weight", c_void_p),
        ("kind", c_int64),
        ("eps", c_float),
        ("bias", c_void_p),
    ]


class CMixture(ctypes.Structure):
    """`references` keeps references to what it points to."""

    references: Any
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(CWeight, "router shared_gate_up shared_down shared_gate"),
        *_all(c_void_p, "router_weight router_bias correction ranks first_seat seats loads"),
        ("routing", CRouting),
        ("experts", CExperts),
        *_all(c_int64, "count shared_act on_input"),
    ]


class CLoraPart(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(c_int64, "start outs first rank at"),
        ("scale", c_float),
    ]


class CLora(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(c_void_p, "a b gain offset parts"),
        *_all(c_int64, "count rank ins is_bf16"),
    ]


class CDeltaNet(ctypes.Structure):
    """`references` keeps references to what it points to."""

    references: Any
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(CWeight, "in gates out"),
        *_all(c_void_p, "conv norm bias a_log conv_state state"),
        *_all(c_int64, "conv_step state_step key_heads K heads V taps"),
        *_all(c_int64, "first_head all_heads all_key_heads interleaved"),
        ("eps", c_float),
    ]


class CMamba2Mixer(ctypes.Structure):
    """`references` keeps references to what it points to."""

    references: Any
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(CWeight, "in out"),
        *_all(c_void_p, "conv conv_bias norm bias a_log skip conv_state state"),
        *_all(c_int64, "conv_step state_step groups K heads V taps first_head norm_group gate_first"),
        *_all(c_float, "low high eps"),
    ]  # fmt: skip


class CLayer(ctypes.Structure):
    """`references`, `recurrent_references` and `mixture_references` keep references to what it points to, beside weights
    and cache."""

    references: Any
    recurrent_references: Any
    mixture_references: Any
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(CWeight, "qkv o gate_up down"),
        *_all(CNorm, "attention_in attention_out mlp_in mlp_out q_norm k_norm v_norm"),
        *_all(c_void_p, "keys values key_scales value_scales sinks delta_net mamba2_mixer mixture flat_ranks"),
        *_all(c_int64, "kind hidden heads kv_heads D rope interleaved block_size window act kv_parts flat_norms gated parallel kv_copies joined"),
        *_all(c_float, "scale softcap residual_scale"),
    ]  # fmt: skip


class CStep(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(c_void_p, "cos sin query_scale positions slots state_rows kept table starts lengths"),
        *_all(c_int64, "tokens rows table_step pairs"),
    ]


class CEncoderLayer(ctypes.Structure):
    """`references` keeps references to what it points to, beside weights."""

    references: Any
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(CWeight, "qkv o up down"),
        *_all(CNorm, "after_attention after_mlp"),
        ("bias", c_void_p),
        *_all(c_int64, "heads kv_heads D window act distances rotary runs"),
        ("scale", c_float),
    ]


class CEncoderStep(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(c_void_p, "cos sin starts counts"),
        ("pairs", c_int64),
    ]


class CGroup(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(c_void_p, "cos sin query_scale"),
        *_all(c_int64, "pairs blocks"),
    ]


class CModel(ctypes.Structure):
    """`references` and `recorded_references` keep references to what it points to."""

    references: tuple[Any, ...]
    recorded_references: Any
    recorded_numbers: frozenset[int] | None = None
    _fields_: ClassVar[Sequence[Any]] = [
        ("head", CWeight),
        ("norm", CNorm),
        *_all(c_void_p, "layers group_of_layer groups table blocks table_ranks recorded states"),
        *_all(c_int64, "count num_groups positions packed vocab num_recorded state_rows words"),
        *_all(c_float, "embedding_scale logit_scale softcap"),
    ]


class CRowParams(ctypes.Structure):
    """`ROW_PARAMS` of worker/sampling/row_params.py is its numpy dtype."""

    _fields_: ClassVar[Sequence[Any]] = [
        ("temperature", c_float),
        ("seed", c_uint32),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("log_min_p", c_double),
    ]


class CRows(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_all(
            c_void_p,
            "tokens num_computed_tokens length num_drafts blocks params adapters rope_offset",
        ),
        *_all(c_int64, "tokens_step blocks_step shift"),
    ]


class CSpeculator(ctypes.Structure):
    """`references` keeps references to what it points to."""

    references: tuple[Any, ...]
    _fields_: ClassVar[Sequence[Any]] = [
        ("model", CModel),
        ("states", CWeight),
        *_all(CNorm, "embedding_norm state_norm"),
        ("join", CWeight),
        ("target_ids", c_void_p),
        *_all(c_int64, "target_vocab normed_residual hands_on_sum"),
    ]


MIRRORS: tuple[type[ctypes.Structure], ...] = (
    CWeight,
    CLoraPart,
    CLora,
    CRankLink,
    CRouting,
    CExperts,
    CMixture,
    CDeltaNet,
    CMamba2Mixer,
    CNorm,
    CLayer,
    CStep,
    CEncoderLayer,
    CEncoderStep,
    CGroup,
    CModel,
    CRowParams,
    CRows,
    CSpeculator,
)

Layout = dict[str, tuple[int, int]]
"""By field: offset and size in bytes; by "": the whole struct's."""


class CFieldLayout(ctypes.Structure):
    """Mirrors `FieldLayout` of kernels/layout.h, which has no check of its own."""

    _fields_: ClassVar[Sequence[Any]] = [
        *_all(ctypes.c_char_p, "of field"),
        *_all(c_int64, "offset size"),
    ]


def layouts_of(library: Any) -> dict[str, Layout]:
    """The layouts in a loaded library, by the names of its structs."""
    first = ctypes.POINTER(CFieldLayout)()
    found: dict[str, Layout] = {}
    for entry in first[: library.quire_layouts(ctypes.byref(first))]:
        found.setdefault(entry.of.decode(), {})[entry.field.decode()] = entry.offset, entry.size
    return found


def layout_of(mirror: type[ctypes.Structure]) -> Layout:
    fields = {name: getattr(mirror, name) for name, *_ in mirror._fields_}
    places = {name: (field.offset, field.size) for name, field in fields.items()}
    return {"": (0, ctypes.sizeof(mirror)), **places}


def differences(
    found: dict[str, Layout], mirrors: Iterable[type[ctypes.Structure]] = MIRRORS
) -> list[str]:
    """Each field that is not in the same place on both sides, as one sentence."""
    wrong = []
    for mirror in mirrors:
        name = mirror.__name__.removeprefix("C")
        here, there = layout_of(mirror), found.get(name, {})
        for field in sorted(here.keys() | there.keys()):
            if here.get(field) != there.get(field):
                label = f"{name}.{field}" if field else name
                sides = (_place(there.get(field)), _place(here.get(field)))
                wrong.append("{} is {} in the library, {} in structs.py".format(label, *sides))
    return wrong


def _place(place: tuple[int, int] | None) -> str:
    return "absent" if place is None else f"{place[1]} bytes at {place[0]}"
