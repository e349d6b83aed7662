"""The Transformers backend's check before serving: unknown models, and deliberately broken bridges.

Each test here breaks one thing that would otherwise be wrong silently.
"""

from __future__ import annotations

import types
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from quire.errors import Unsupported
from quire.models.transformers import model as generic
from quire.models.transformers import paged
from quire.models.transformers.model import CACHE_NAMES, TransformersModel
from quire.models.transformers.modes import PAGED, PER_REQUEST, choose_mode
from tests.models.archs import ARCHS, Arch, make_model

BY_LABEL = {arch.label: arch for arch in ARCHS}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.fixture
def any_config_packs(monkeypatch):
    """The tables of `modes.py` know nothing: only what is measured can stop paged mode."""
    monkeypatch.setattr(generic, "choose_mode", lambda *_: (PAGED, "tables are off"))


def build(label: str, change=None, dtype=torch.float32) -> TransformersModel:
    model = make_model(BY_LABEL[label]).to(dtype)
    if change is not None:
        change(model)
    return TransformersModel(model, max_model_len=256)


# ------------------------------------------------------------------------------------- strange models


class Shift(nn.Module):
    """Adds the token before to every token: mixes tokens past attention, without a cache."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x_BTD):
        return self.inner(x_BTD + 0.5 * torch.nn.functional.pad(x_BTD, (0, 0, 1, 0))[:, :-1])


def shift_mlp(model) -> None:
    layer = model.model.layers[1]
    layer.mlp = Shift(layer.mlp)


def own_attention(model) -> None:
    """One layer computes its attention by itself, causal over the whole pass."""
    attention = model.model.layers[1].self_attn

    def forward(self, hidden_states, position_embeddings=None, **others):
        x_BTHD = (1, hidden_states.shape[1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(x_BTHD).transpose(1, 2)
        k = self.k_proj(hidden_states).view(x_BTHD).transpose(1, 2)
        v = self.v_proj(hidden_states).view(x_BTHD).transpose(1, 2)
        cache = others.get(
            "cache", others.get("past_key_values")
        )  # its name since 5.24, and before
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    attention.forward = types.MethodType(forward, attention)


def position_bias(model) -> None:
    """One layer hands the interface a tensor that we have no word for."""
    attention = model.model.layers[1].self_attn
    before = attention.forward

    def forward(self, *args, **kwargs):
        return before(*args, **kwargs, strange_bias=torch.zeros(1))

    attention.forward = types.MethodType(forward, attention)


def twice(model) -> None:
    attention = model.model.layers[1].self_attn
    before = attention.forward

    def forward(self, hidden_states, **kwargs):
        before(hidden_states, **{**kwargs, **dict.fromkeys(kwargs.keys() & set(CACHE_NAMES))})
        return before(hidden_states, **kwargs)

    attention.forward = types.MethodType(forward, attention)


def places_as_positions(model) -> None:
    """Counts tokens of the pass and takes the count for a position."""
    rotary = model.model.rotary_emb
    before = rotary.forward

    def forward(self, x, position_ids, **kwargs):
        if not torch.equal(position_ids[0], torch.arange(position_ids.shape[1])):
            position_ids = position_ids[:, :1] + torch.arange(position_ids.shape[1])[None]
        return before(x, position_ids, **kwargs)

    rotary.forward = types.MethodType(forward, rotary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (own_attention, "2 of its 3 layers go through the attention interface"),
        (position_bias, "passes strange_bias to attention"),
        (twice, "calls attention more than once"),
        (places_as_positions, "differ from its plain pass"),
    ],
)
def test_a_model_that_cannot_be_paged_gets_its_own_cache(change, reason, dtype) -> None:
    ours = build("llama", change, dtype)
    assert ours.mode == PER_REQUEST
    assert reason in ours.description
    assert ours.attention_layers() == []
    assert "prefix caching" in ours.description
    assert not ours.supports_prefix_caching


@pytest.mark.parametrize("label", ["llama", "mamba2"])
def test_a_warning_of_the_models_code_is_no_failure(label) -> None:
    """Also under `python -W error`: once, a new release of Transformers warned of a name in each pass."""

    def warn_in_each_pass(model) -> None:
        first = model.get_decoder().layers[0]
        first.register_forward_pre_hook(
            lambda *_: warnings.warn("an old name", FutureWarning, stacklevel=1)
        )

    quiet = build(label)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "an old name")
        ours = build(label, warn_in_each_pass)
    assert (ours.mode, ours.description) == (quiet.mode, quiet.description)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_an_unsupported_model_is_refused(dtype) -> None:
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM.*tokens differ from its plain pass"):
        build("llama", shift_mlp, dtype)


def test_state_outside_the_cache_is_refused(any_config_packs, monkeypatch) -> None:
    monkeypatch.setattr(generic, "check_supported", lambda *_: None)
    model = make_model(Arch("recurrent_gemma", PER_REQUEST))
    with pytest.raises(Unsupported, match="differ from its plain pass"):
        TransformersModel(model, max_model_len=256)


def test_numbers_that_are_not_finite_are_refused() -> None:
    def break_it(model) -> None:
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan

    with pytest.raises(Unsupported, match="not finite"):
        build("llama", break_it)


@pytest.mark.parametrize("arch", [a for a in ARCHS if a.mode == PER_REQUEST], ids=lambda a: a.label)
def test_the_tables_are_not_needed(arch, any_config_packs) -> None:
    """What the tables send to its own cache, the measurements alone send there too."""
    assert TransformersModel(make_model(arch), max_model_len=256).mode == PER_REQUEST


def test_position_dependent_temperature_is_detected(any_config_packs) -> None:
    config = {**BY_LABEL["llama4_text"].config, "floor_scale": 4, "attn_scale": 3.0}
    assert 0 in config["no_rope_layers"]
    model = make_model(Arch("llama4_text", PAGED, config))
    assert model.config.attn_temperature_tuning
    assert TransformersModel(model, max_model_len=256).mode == PER_REQUEST


# ------------------------------------------------------------------------------------- broken bridges


def without(**lost):
    """`paged._layer`, with some of what a layer asked for forgotten."""
    whole = paged._layer

    def layer(*args):
        made = whole(*args)
        there = {
            name: value for name, value in lost.items() if getattr(made.spec, name) is not None
        }
        made.spec = replace(made.spec, **there)
        return made

    return layer


@pytest.mark.parametrize(
    ("label", "lost"),
    [
        ("gemma2", {"window": None}),
        ("gemma2", {"window": 6}),
        ("mistral", {"window": 4}),
        ("phimoe", {"window": None}),
        ("gemma2", {"softcap": 1.0}),
        ("gpt_oss", {"sinks": None}),
        ("granite", {"scale": 0.25}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_a_wrong_bridge_is_detected(label, lost, monkeypatch) -> None:
    assert build(label).mode == PAGED
    monkeypatch.setattr(paged, "_layer", without(**lost))
    assert build(label).mode == PER_REQUEST


def test_probing_leaves_no_trace() -> None:
    model = make_model(BY_LABEL["llama"])
    before = model.config._attn_implementation
    calls = paged.probe(model, lambda ids, positions: model(input_ids=ids, position_ids=positions))
    assert len(calls) == 3
    assert model.config._attn_implementation == before
    with pytest.raises(RuntimeError, match="probing only"):
        paged._record(model, *[torch.zeros(1, 1, 1, 1)] * 3)


# ------------------------------------------------------------------------------------- what the config says


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"model_type": "llama"}, PAGED),
        ({"model_type": "unheard_of", "layer_types": ["full_attention", "wavelet"]}, PER_REQUEST),
        ({"model_type": "falcon_like", "alibi": True}, PER_REQUEST),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, PER_REQUEST),
        ({"model_type": "llama4_text", "attention_chunk_size": 128}, PAGED),
        (
            {"model_type": "llama4_text", "attn_temperature_tuning": True, "floor_scale": 64},
            PER_REQUEST,
        ),
        ({"model_type": "mamba"}, PER_REQUEST),
    ],
)
def test_choose_mode(config, mode) -> None:
    chosen, why = choose_mode(config, max_model_len=100)
    assert chosen == mode
    assert why


def test_the_longest_request_counts_for_chunks() -> None:
    config = {"model_type": "llama4_text", "attention_chunk_size": 8192}
    assert choose_mode(config, 8192)[0] == PAGED
    mode, why = choose_mode(config, 8193)
    assert mode == PER_REQUEST
    assert "--max-model-len 8192" in why
