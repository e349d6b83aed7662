"""Which attention backend serves a model, and the error if none can."""

from __future__ import annotations

import logging
from dataclasses import fields, replace

import pytest
from torch import nn, ones

from quire.attention import base
from quire.attention.base import Capabilities, Needs, choose_backend
from quire.attention.reference import ReferenceAttention
from quire.errors import ConfigError
from quire.layers.attention import Attention

PLAIN = Needs(device="cpu", dtype="bfloat16", head_dims=frozenset({64}), block_size=64)
NARROW = Capabilities(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"bfloat16"}),
    head_dims=(64, 128),
    block_sizes=(16, 64),
)


class Narrow:
    can = NARROW


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "NARROW": f"{__name__}:Narrow",
        "GONE": "quire.attention.nowhere:Gone",
        **base.BACKENDS,
    }
    monkeypatch.setattr(base, "BACKENDS", table)


def test_needs_cover_all_layers() -> None:
    sinks = nn.Parameter(ones(4), requires_grad=False)
    layers = [
        Attention(4, 2, 16),
        Attention(4, 2, 32, window=5, v_head_dim=8),
        Attention(4, 2, 16, softcap=2.0, sinks=sinks),
        Attention(4, 2, 16, causal=False),
    ]
    about = {"device": "cpu", "dtype": "float32", "kv_dtype": "auto", "block_size": 16}
    plain = Needs.of([layers[0].spec], **about)
    assert plain == Needs(device="cpu", dtype="float32", head_dims=frozenset({16}), block_size=16)
    assert Needs.of([layer.spec for layer in layers], **about) == replace(
        plain,
        head_dims=frozenset({16, 32}),
        **dict.fromkeys(("differing_values", "windows", "softcap", "sinks", "non_causal"), True),
    )


LACKING = {
    "device": ("cuda", "device cuda"),
    "dtype": ("float32", "dtype float32"),
    "kv_dtype": ("fp8", "KV cache of fp8"),
    "head_dims": (frozenset({64, 80, 96}), "head size 80, head size 96"),
    "block_size": (32, "blocks of 32"),
    "differing_values": (True, "values whose size differs from keys"),
    "windows": (True, "windows"),
    "softcap": (True, "softcap"),
    "sinks": (True, "sinks"),
    "non_causal": (True, "attention to later tokens"),
    "latent": (True, "a cache without values (MLA)"),
}


@pytest.mark.parametrize("name", [f.name for f in fields(Needs)])
def test_every_need_can_be_lacking(name: str) -> None:
    assert NARROW.lacking(PLAIN) == []
    value, said = LACKING[name]
    assert ", ".join(NARROW.lacking(replace(PLAIN, **{name: value}))) == said


def test_a_cache_without_values_is_not_quantized() -> None:
    can = replace(NARROW, latent=True, kv_dtypes=frozenset({"auto", "bfloat16", "int8"}))
    for name, lacks in (("auto", []), ("bfloat16", []), ("int8", ["KV cache of int8 without values (MLA)"])):  # fmt: skip
        assert can.lacking(replace(PLAIN, latent=True, kv_dtype=name)) == lacks


def test_the_first_usable_backend_is_chosen_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order = ("GONE", "NARROW", "TORCH_SDPA")
    with caplog.at_level(logging.INFO):
        assert choose_backend(None, order, PLAIN)[0] == "NARROW"
        name, backend = choose_backend("auto", order, replace(PLAIN, sinks=True, windows=True))
    assert name == "TORCH_SDPA"
    assert isinstance(backend, ReferenceAttention)
    assert "attention: TORCH_SDPA" in caplog.text
    assert "NARROW lacks windows, sinks" in caplog.text
    assert "GONE cannot be loaded" in caplog.text


def test_a_requested_backend_is_used_or_refused() -> None:
    order = ("TORCH_SDPA",)
    assert choose_backend("torch_sdpa", ("NARROW",), PLAIN)[0].upper() == "TORCH_SDPA"
    with pytest.raises(ConfigError, match="NARROW lacks softcap"):
        choose_backend("NARROW", order, replace(PLAIN, softcap=True))
    with pytest.raises(
        ConfigError, match="'FLASH' is unknown; choose from NARROW, GONE, TORCH_SDPA"
    ):
        choose_backend("FLASH", order, PLAIN)
    with pytest.raises(ConfigError, match="CPU_ATTN lacks device tpu"):
        choose_backend(None, ("CPU_ATTN",), replace(PLAIN, device="tpu"))


def test_attention_outside_a_worker_raises() -> None:
    layer = Attention(4, 2, 16, layer_index=7)
    with pytest.raises(RuntimeError, match="attention layer 7 has no backend yet"):
        layer(ones(1, 4, 16), ones(1, 2, 16), ones(1, 2, 16))
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 KV heads"):
        Attention(4, 3, 16)
    with pytest.raises(ValueError, match="a layer with a window must be causal"):
        Attention(4, 2, 16, window=4, causal=False)


def test_only_the_reference_backend_attends_to_later_tokens() -> None:
    needs = replace(PLAIN, non_causal=True)
    with pytest.raises(ConfigError, match="CPU_ATTN lacks attention to later tokens"):
        choose_backend("CPU_ATTN", (), needs)
    assert choose_backend("auto", ("CPU_ATTN", "TORCH_SDPA"), needs)[0] == "TORCH_SDPA"
