"""Rotary positions: frequencies of every recipe, and turning, against Transformers' own."""

from __future__ import annotations

import importlib
import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from quire.layers.rotary import ROPE_INIT_FUNCTIONS, TABLE_LENGTH, Rotary
from quire.models.hf_config import TextConfig, rope_parameters
from quire.ops.reference import rotate
from tests.models.cases import Case, write
from tests.models.harness import Runner
from tests.models.test_native import build, plain

TRAINED, LONGEST = 4096, 16384
SHORT = [1.0 + 0.05 * i for i in range(32)]
LONG = [1.0 + 0.9 * i for i in range(32)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 3.0}),
    ("linear", {"factor": 3.0, "partial_rotary_factor": 0.5}),
    ("dynamic", {"factor": 3.0}),
    ("yarn", {"factor": 4.0}),
    ("yarn", {"factor": 4.0, "partial_rotary_factor": 0.25}),
    ("yarn", {"factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0}),
    ("yarn", {"factor": 4.0, "truncate": False}),
    ("yarn", {"factor": 4.0, "attention_factor": 0.8}),
    ("yarn", {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2}),
    ("yarn", {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.0}),
    ("longrope", {"short_factor": SHORT, "long_factor": LONG}),
    ("longrope", {"short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.5}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "partial_rotary_factor": 0.5}),
    ("proportional", {}),
    ("proportional", {"partial_rotary_factor": 0.25, "factor": 2.0}),
]


def parameters_of(kind: str, more: dict[str, Any]) -> dict[str, Any]:
    found = {"rope_type": kind, "rope_theta": 20000.0, **more}
    if kind in ("yarn", "longrope", "llama3"):
        found["original_max_position_embeddings"] = TRAINED
    return found


@pytest.mark.parametrize(("kind", "more"), WAYS)
@pytest.mark.parametrize("long", [False, True])
def test_frequencies_equal_transformers(kind: str, more: dict[str, Any], long: bool) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = parameters_of(kind, more)
    config = LlamaConfig(head_dim=64, max_position_embeddings=LONGEST, rope_parameters=dict(given))
    length = LONGEST if long else TRAINED
    want_P, want_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    read = rope_parameters({"rope_parameters": given, "max_position_embeddings": LONGEST})
    ours = Rotary(64, read, max_length=length)
    torch.testing.assert_close(ours.frequencies_P, want_P, atol=0, rtol=1e-6)
    assert math.isclose(ours.attention_factor, want_factor, rel_tol=1e-7)


def test_every_recipe_is_compared() -> None:
    of_towers = {
        "axial",
        "axial_alternating",
    }  # tests/media/test_vision_towers.py compares the towers
    assert {kind for kind, _ in WAYS} | {"default"} | of_towers == set(ROPE_INIT_FUNCTIONS)


MODULES = {  # how the first features of a head turn: halves apart, all or a part; neighbours
    "llama": (False, {}),
    "phi": (False, {"partial_rotary_factor": 0.5}),
    "glm": (True, {"partial_rotary_factor": 0.5}),
    "cohere": (True, {}),
}


@pytest.mark.parametrize("kind", MODULES)
def test_turning_is_that_of_transformers(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    interleaved, more = MODULES[kind]
    given = {"rope_type": "default", "rope_theta": 10000.0, **more}
    config = CONFIG_MAPPING[kind](
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, rope_parameters=dict(given)
    )
    config.head_dim = 32
    turning = getattr(module, f"{kind.capitalize()}RotaryEmbedding")(config)
    positions_T = torch.tensor([0, 1, 2, 17, 18, 100, 1999])
    q_THD, k_TKD = torch.randn(7, 2, 32), torch.randn(7, 2, 32)
    cos, sin = turning(q_THD, positions_T[None])
    ours = Rotary(32, rope_parameters({"rope_parameters": given}))(positions_T)
    size = int(32 * more.get("partial_rotary_factor", 1.0))
    assert ours[0].shape == (7, size // 2)
    for got, x in ((rotate(x, *ours, interleaved), x) for x in (q_THD, k_TKD)):
        if kind == "phi":  # its attention splits the head before and joins it after
            turned, _ = module.apply_rotary_pos_emb(
                x[None, ..., :size], x[None, ..., :size], cos, sin, 2
            )
            want = torch.cat((turned[0], x[..., size:]), -1)
        else:
            want = module.apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0]
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


def test_dynamic_beyond_the_trained_length_is_generation_token_by_token(tmp_path: Path) -> None:
    """Transformers scales by the longest text it has seen so far, and keeps keys as they were turned."""
    from transformers import DynamicCache

    given = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    case = Case("", "llama", {"rope_parameters": given, "max_position_embeddings": 32})
    theirs = write(case, tmp_path)
    tokens = torch.randint(0, 131, (72,), generator=torch.Generator().manual_seed(1)).tolist()
    new = (
        "cache" in inspect.signature(theirs.forward).parameters
    )  # its name since Transformers 5.24
    cache = {"cache" if new else "past_key_values": DynamicCache(config=theirs.config)}
    with torch.inference_mode():
        want = [theirs(torch.tensor([tokens[:20]]), **cache).logits[0]]
        want += [theirs(torch.tensor([[t]]), **cache).logits[0] for t in tokens[20:]]
    ours = build(tmp_path, max_model_len=72, hf_overrides={"max_position_embeddings": 32})
    got = Runner(ours).prefill(0, tokens, chunk=7)
    assert (got - torch.cat(want)).abs().max() < 1e-4


def test_longrope_uses_one_set_of_factors(tmp_path: Path) -> None:
    """The long set as soon as a request may be long: for long texts that is what Transformers says."""
    given = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 32,
    }
    theirs = write(Case("", "llama", {"rope_parameters": given}), tmp_path)
    tokens = torch.randint(0, 131, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    long, short = build(tmp_path, max_model_len=256), build(tmp_path, max_model_len=32)
    assert (Runner(long).prefill(0, tokens) - plain(theirs, tokens)).abs().max() < 1e-4
    short_text = tokens[:32]
    want = plain(theirs, short_text)
    assert (Runner(short).prefill(0, short_text) - want).abs().max() < 1e-4
    assert (Runner(long).prefill(0, short_text) - want).abs().max() > 1e-2


OLD = [
    ({"rope_theta": 7.0}, {"rope_type": "default", "rope_theta": 7.0}),
    ({}, {"rope_type": "default", "rope_theta": 10000.0}),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, {"rope_type": "longrope", "factor": 2.0}),
    (
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}, "rope_theta": 9.0},
        {"rope_type": "default", "rope_theta": 9.0},
    ),
    (
        {"rope_scaling": {"type": "yarn", "rope_type": "yarn"}, "max_position_embeddings": 64},
        {"rope_type": "yarn", "original_max_position_embeddings": 64},
    ),
    ({"partial_rotary_factor": 0.4}, {"partial_rotary_factor": 0.4}),
    (
        {
            "original_max_position_embeddings": 8,
            "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 9},
        },
        {"original_max_position_embeddings": 8},
    ),
]


@pytest.mark.parametrize(("config", "wanted"), OLD)
def test_both_spellings_are_read(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert wanted.items() <= rope_parameters(config).items()


def test_each_kind_of_layer_may_have_its_own() -> None:
    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    cfg = TextConfig({"layer_types": list(by_type), "rope_parameters": by_type})
    assert cfg.rope(0)["factor"] == 8.0
    assert cfg.rope(1)["rope_theta"] == 1e4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "'factor'"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "factor": 2.0}, "1 factors for 32 pairs"),
    ],
)
def test_invalid_rope_settings_are_named(given: dict[str, Any], said: str) -> None:
    config = {"rope_parameters": given, "max_position_embeddings": 64}
    with pytest.raises(ConfigError, match=said):
        Rotary(64, rope_parameters(config), max_length=32)


@pytest.mark.parametrize(("kind", "more"), WAYS)
def test_table_angles_equal_computed_angles(kind: str, more: dict[str, Any]) -> None:
    """To the bit, in any batch; positions beyond the table are computed."""
    config = {"max_position_embeddings": TRAINED, "rope_scaling": {"rope_type": kind, **more}}
    ours = Rotary(64, rope_parameters(config), max_length=LONGEST)
    for places in ([0], [TABLE_LENGTH - 1, 5, 5], list(range(100)), [7, TABLE_LENGTH], [LONGEST]):
        positions_T = torch.tensor(places)
        for got, want in zip(ours(positions_T), ours.angles(positions_T), strict=True):
            assert torch.equal(got, want)


PLACES = torch.stack([torch.arange(9), torch.arange(9) // 3 + 2, torch.arange(9) % 3 + 5])  # [3, T]


@pytest.mark.parametrize(
    ("family", "name", "more", "sections"),
    [
        ("qwen2_vl", "Qwen2VLRotaryEmbedding", {}, [2, 3, 3]),
        ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", {"mrope_interleaved": True}, [4, 2, 2]),
    ],
)
def test_multi_component_positions_equal_transformers(
    family: str, name: str, more: dict[str, Any], sections: list[int]
) -> None:
    """In blocks, and in turns."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more}
    config = SimpleNamespace(rope_parameters=rope, max_position_embeddings=64, head_dim=16)
    wanted = getattr(module, name)(config)(torch.ones(1), PLACES[:, None])
    for got, want in zip(Rotary(16, rope)(PLACES.T), wanted, strict=True):
        torch.testing.assert_close(got, want[0, :, :8])


def test_one_position_for_all_components_is_that_position() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    at_T = torch.arange(9)
    for got, want in zip(
        Rotary(16, rope)(at_T[:, None].expand(9, 3)), Rotary(16, rope)(at_T), strict=True
    ):
        assert torch.equal(got, want)


def test_components_without_a_section_are_refused() -> None:
    with pytest.raises(ValueError, match="mrope_section"):
        Rotary(16, {"rope_type": "default", "rope_theta": 1e4})(PLACES.T)
    with pytest.raises(ConfigError, match="does not add up to 8 pairs"):
        Rotary(16, {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]})


def test_layer_types_without_parameters_are_refused() -> None:
    by_type = {"full_attention": {"rope_type": "default"}}
    cfg = TextConfig({"layer_types": ["sliding_attention"], "rope_parameters": by_type})
    with pytest.raises(ConfigError, match="none for layers of type 'sliding_attention'"):
        cfg.rope(0)
