"""Speculators against plain references, in every checkpoint form, with every option; and checkpoints that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quire.config.engine import EngineConfig, ModelSpec
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError, Unsupported
from quire.forward_context import current_batch
from quire.models.base import LanguageModel
from quire.models.hf_config import read_config
from quire.models.load import build_model
from quire.models.speculators.base import Speculator
from quire.models.speculators.spec import speculator_spec
from quire.platforms.cpu import CpuPlatform
from tests.models import speculator_references as plain
from tests.models.cases import BASE, VOCAB, Case, write
from tests.models.harness import Runner
from tests.models.speculator_checkpoints import Drawn, eagle3_tensors, save

CLOSE = 1e-4
SIZE = BASE["hidden_size"]
CONFIG = {
    **{key: BASE[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")},
    "model_type": "llama", "vocab_size": VOCAB, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 300.0,
    "max_position_embeddings": 256,
}  # fmt: skip
LENGTH, PASSES = 37, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("target")
    write(Case("target", "llama", {"num_hidden_layers": 4}), folder)
    return spec_of(folder)


@pytest.fixture(scope="module")
def target_model(target: ModelSpec) -> LanguageModel:
    return build_model(target, CpuPlatform())


def spec_of(folder: Path) -> ModelSpec:
    config = EngineConfig.from_keywords(model=str(folder), dtype="float32", max_model_len=200)
    return resolve_config(config).spec


def spec_for(method: str, folder: Path, target: ModelSpec) -> ModelSpec:
    own = replace(target, path=str(folder), hf_config=read_config(str(folder)), dtype="bfloat16")
    return speculator_spec(method, own, target)


def load(method: str, folder: Path, target: ModelSpec, model: LanguageModel) -> Speculator:
    found = build_model(spec_for(method, folder, target), CpuPlatform())
    assert isinstance(found, Speculator)
    found.use_target(model)
    return found


class Fed(nn.Module):
    """A speculator as a language model: it finds the states of its rows by position."""

    def __init__(self, own: Speculator):
        super().__init__()
        self.own, self.step = own, 0
        self.states: dict[int, Tensor] = {}  # by row, [positions, D]

    def attention_layers(self) -> Any:
        return self.own.attention_layers()

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.own.embed(ids_T, self.step)

    def forward(self, embeddings_TD: Tensor, positions_T: Tensor) -> Tensor:
        batch = current_batch()
        rows = [row for row, count in zip(batch.rows_B.tolist(), batch.query_lens, strict=True) for _ in range(count)]  # fmt: skip
        states_TD = torch.stack([self.states[row][at] for row, at in zip(rows, positions_T.tolist(), strict=True)])  # fmt: skip
        self.out_TD = self.own(embeddings_TD, positions_T, states_TD, self.step)
        return self.out_TD

    def logits(self, states_SD: Tensor) -> Tensor:
        return self.own.logits(states_SD, self.step)


Reference = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def check(own: Speculator, reference: Reference, table: Tensor, states: Tensor) -> None:
    """All logits of pass 0, alone and in pieces beside another row; then passes that take their own states.

    Args:
        states: what pass 0 takes, of LENGTH positions.
    """
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (LENGTH + PASSES,), generator=draw).tolist()
    fed = Fed(own)
    runner = Runner(fed, num_tokens=512)
    fed.states = dict.fromkeys((0, 1), states)
    whole = runner.prefill(0, ids[:LENGTH])
    out = fed.out_TD
    wanted = reference(table[ids[:LENGTH]], states)
    assert wanted[1].std() > 0.1
    assert (whole - wanted[1]).abs().max() < CLOSE
    assert (out - wanted[0]).abs().max() < CLOSE
    pieces = runner.prefill(1, ids[:LENGTH], chunk=7)
    assert torch.equal(pieces, whole)
    mine, theirs = out[-1:], wanted[0][-1:]
    for step in range(1, PASSES):
        fed.states[0] = torch.cat((fed.states[0], mine))
        states = torch.cat((states, theirs))
        runner.tokens[0].append(ids[LENGTH + step - 1])
        logits = runner.step([(0, 1)])[0]
        found = reference(table[ids[: LENGTH + step]], states)
        assert (logits[-1] - found[1][-1]).abs().max() < CLOSE
        mine, theirs = fed.out_TD, found[0][-1:]


def table_of(target: ModelSpec) -> tuple[Tensor, Tensor]:
    found = load_file(Path(target.path) / "model.safetensors")
    return found["model.embed_tokens.weight"], found["lm_head.weight"]


# ------------------------------------------------------------------------------------ EAGLE-3


def speculators_form(config: Mapping[str, Any], **outer: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "model_type": "speculators",
        "speculators_config": {"algorithm": "eagle3"}, "draft_vocab_size": 40, **outer,
        "transformer_layer_config": dict(config),
    }  # fmt: skip


def eagle3_cases() -> dict[str, tuple[dict[str, Any], dict[str, Tensor], list[int]]]:
    """Name -> config, tensors, layers that it reads."""
    drawn = Drawn(9)
    native = {**CONFIG, "draft_vocab_size": 40, "architectures": ["LlamaForCausalLMEagle3"]}
    options = eagle3_tensors("layers.0", width=2 * SIZE, qk_norm=True)
    options |= {f"fc_norm.{i}.weight": drawn(SIZE) for i in range(2)}
    options |= drawn.layer("layers.1", qk_norm=True) | {
        "layers.1.input_layernorm.weight": drawn(SIZE)
    }
    windowed = {**CONFIG, "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 9}  # fmt: skip
    whole = eagle3_tensors(words=VOCAB)
    shipped = {key: whole[key] for key in whole if key not in ("d2t", "t2d")}
    return {
        "SafeAILab": (native, eagle3_tensors(), [2, 2, 1]),
        "layers by number": (
            {**native, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 0, 4], "norm_before_fc": True}},
            eagle3_tensors(biases="qkvo") | {"input_norm.weight": drawn(3 * SIZE)}, [3, 0, 4],
        ),
        "speculators": (
            speculators_form(windowed, norm_before_residual=True, norm_output=True, fc_norm=True, eagle_aux_hidden_state_layer_ids=[1, 3]),
            options, [1, 3],
        ),
        "one table, no other ids": ({**CONFIG, "eagle_config": None}, shipped | {"embed_tokens.weight": drawn(VOCAB, SIZE)}, [2, 2, 1]),
        "the last states": (
            {**native, "norm_before_residual": True, "eagle_config": {"use_aux_hidden_state": False}},
            {key: value for key, value in eagle3_tensors().items() if key != "fc.weight"}, [],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", eagle3_cases())
def test_eagle3_equals_a_plain_reference(name: str, tmp_path: Path, target: ModelSpec, target_model: LanguageModel) -> None:  # fmt: skip
    config, tensors, layers = eagle3_cases()[name]
    own = load("eagle3", save(tmp_path, config, tensors), target, target_model)
    assert list(own.after) == layers
    raw = Drawn(7)(LENGTH, SIZE * (len(layers) or 1))
    with torch.inference_mode():
        states = own.target_states(raw)
    if layers:
        wanted = plain.eagle3_states(raw, tensors, len(layers))
        assert (states - wanted).abs().max() < CLOSE
    flat = {**config, **config.get("transformer_layer_config", {})}
    table = tensors.get("embed_tokens.weight", table_of(target)[0])
    head = tensors["lm_head.weight"]
    check(own, lambda e, s: plain.eagle3(e, s, tensors, flat, head), table, states)
    if "d2t" in tensors:
        assert own.target_ids_V is not None
        assert torch.equal(own.target_ids_V.sort()[0], tensors["t2d"].nonzero()[:, 0])
        assert torch.equal(own.target_ids_V, torch.arange(40) + tensors["d2t"])
    else:
        assert own.target_ids_V is None


def test_parallel_drafting_has_a_mask(tmp_path: Path, target: ModelSpec, target_model: LanguageModel) -> None:  # fmt: skip
    mask = Drawn(2)(1, 1, 3 * SIZE)
    config = {**CONFIG, "draft_vocab_size": 40, "parallel_drafting": True}
    tensors = eagle3_tensors() | {"mask_hidden": mask}
    own = load("eagle3", save(tmp_path / "a", config | {"ptd_token_id": 77}, tensors), target, target_model)  # fmt: skip
    assert own.mask is not None
    assert own.mask[0] == 77
    assert torch.equal(own.mask[1], mask[0])
    for wrong, change in {
        "mask_token_id=None": {},
        "mask_token_id=131": {"ptd_token_id": VOCAB},
    }.items():
        with pytest.raises(ConfigError, match=f"{wrong} of .*needs a token id"):
            spec_for("eagle3", save(tmp_path / "b", config | change, tensors), target)
    del tensors["mask_hidden"]
    with pytest.raises(ConfigError, match="has no tensor mask_hidden"):
        spec_for("eagle3", save(tmp_path / "c", config, tensors), target)


def changed(tensors: Mapping[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    found = {**tensors, **{key.replace("__", "."): value for key, value in changes.items()}}
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"d2t": torch.arange(40) * 4}, r"d2t\[27\] of .* is token 135 .* outside its vocabulary of 131"),
        ({}, {"d2t": -torch.arange(40) - 1}, r"d2t\[0\] .* is token -1"),
        ({}, {"d2t": torch.zeros(39, dtype=torch.int64)}, r"d2t .*\[39\]; it must have an integer for each of the 40"),
        ({}, {"d2t": torch.zeros(40)}, r"d2t of .* is torch\.float32"),
        ({}, {"d2t": None}, "has no tensor d2t"),
        ({}, {"lm_head__weight": None}, r"has no tensor lm_head\.weight"),
        ({}, {"fc__weight": None}, r"has no tensor fc\.weight"),
        ({}, {"fc__weight": torch.tensor(1.0)}, r"has no tensor fc\.weight"),
        ({"target_hidden_size": 64}, {}, "target_hidden_size .* is 64, but the target .* has hidden_size=48"),
        ({"hidden_size": 64}, {}, "hidden_size .* is 64, but the target .* has hidden_size=48"),
        ({"hidden_size": None}, {}, "hidden_size=None"),
        (
            {"hidden_size": 64, "use_aux_hidden_state": False},
            {"embed_tokens__weight": torch.zeros(VOCAB, 64), "lm_head__weight": torch.zeros(40, 64)},
            "hidden_size .* is 64, but the target .* has hidden_size=48",
        ),
        ({"draft_vocab_size": 41}, {"d2t": torch.zeros(41, dtype=torch.int64)}, r"lm_head\.weight .* shape \[40, 48\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, {}, r"fc\.weight .* takes 144 features.* \[1, 2\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, {}, r"layer_ids=\[1, 2, 5\] .* 4 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, {}, r"layer_ids=3 .* 4 layers"),
        ({"eagle_config": [1]}, {}, "eagle_config=.*this is an object"),
        ({"num_hidden_layers": 1 << 40}, {}, "num_hidden_layers=.*at most"),
    ],
)  # fmt: skip
def test_checkpoints_that_do_not_fit_are_refused_before_loading(
    config: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path, target: ModelSpec
) -> None:
    own = {**CONFIG, "draft_vocab_size": 40, **config}
    folder = save(tmp_path, own, changed(eagle3_tensors(), **tensors))
    spec = replace(target, path=str(folder), hf_config=own)
    with pytest.raises(ConfigError, match=message):
        speculator_spec("eagle3", spec, target)


def test_a_table_that_is_the_targets_is_not_loaded_again(tmp_path: Path, target: ModelSpec, target_model: LanguageModel) -> None:  # fmt: skip
    table, head = table_of(target)
    tensors = changed(eagle3_tensors(words=VOCAB), d2t=None, t2d=None)
    shipped = tensors | {"embed_tokens.weight": table, "lm_head.weight": head}
    own = load("eagle3", save(tmp_path / "a", CONFIG, shipped), target, target_model)
    assert own.model.embed_tokens is None
    assert own.lm_head is None
    other = shipped | {"embed_tokens.weight": table + 1e-3, "lm_head.weight": head + 1e-3}
    own = load("eagle3", save(tmp_path / "b", CONFIG, other), target, target_model)
    assert own.model.embed_tokens is not None
    assert own.lm_head is not None


# ------------------------------------------------------------------------------------ EAGLE-1


@pytest.mark.parametrize("options", [{}, {"layers": 2, "biases": "qkv", "fc": True}], ids=["plain", "biases"])  # fmt: skip
def test_eagle_equals_a_plain_reference(options: dict[str, Any], tmp_path: Path, target: ModelSpec, target_model: LanguageModel) -> None:  # fmt: skip
    drawn, layers = Drawn(), options.get("layers", 1)
    tensors = {"fc.weight": drawn(SIZE, 2 * SIZE), "embed_tokens.weight": drawn(VOCAB, SIZE)}
    for i in range(layers):
        tensors |= drawn.layer(f"layers.{i}", biases=options.get("biases", ""))
        if i:
            tensors[f"layers.{i}.input_layernorm.weight"] = drawn(SIZE)
    if "fc" in options:
        tensors["fc.bias"] = drawn(SIZE) - 1
        del tensors["embed_tokens.weight"]
    config = {**CONFIG, "num_hidden_layers": layers}
    own = load("eagle", save(tmp_path, config, tensors, "pytorch_model.bin.pt"), target, target_model)  # fmt: skip
    table, head = table_of(target)
    table = tensors.get("embed_tokens.weight", table)
    states = Drawn(7)(LENGTH, SIZE)
    assert torch.equal(own.target_states(states), states)
    check(own, lambda e, s: plain.eagle(e, s, tensors, config, head), table, states)


# ------------------------------------------------------------------------------------ Medusa


HEADS = 3


def medusa_forms(drawn: Drawn) -> dict[str, tuple[dict[str, Any], dict[str, Tensor], str]]:
    """Name -> config, tensors, file: the same blocks in each form."""
    blocks = {
        f"blocks.{i}.layers.{j}.weight": drawn(SIZE, SIZE) for i in range(HEADS) for j in range(2)
    }
    biases = {key.replace("weight", "bias"): drawn(SIZE) - 1 for key in blocks}
    heads = {f"lm_heads.{i}.weight": drawn(VOCAB, SIZE) for i in range(HEADS)}
    ids = torch.randperm(VOCAB, generator=drawn.draw)[:50]
    new = {"num_heads": HEADS, "num_hidden_layers": 2, "hidden_size": SIZE, "vocab_size": VOCAB}
    old = {}
    for key, tensor in (blocks | biases).items():
        _, i, _, j, kind = key.split(".")
        old[f"{i}.{j}.linear.{kind}"] = tensor
    old |= {f"{i}.2.weight": heads[f"lm_heads.{i}.weight"] for i in range(HEADS)}
    return {
        "blocks": (new, blocks | biases | heads, "model.safetensors"),
        "one head": (new | {"original_lm_head": True}, blocks | {"lm_heads.0.weight": heads["lm_heads.0.weight"]}, "model.safetensors"),
        "the target's head": (new | {"original_lm_head": True}, blocks | biases, "model.safetensors"),
        "cut heads": (new | {"truncated_vocab_size": 50}, blocks | heads | {"token_map": ids}, "model.safetensors"),
        "small heads": (
            new | {"truncated_vocab_size": 50}, blocks | {key: head[ids] for key, head in heads.items()} | {"token_map": ids}, "model.safetensors",
        ),
        "numbers": ({"medusa_num_heads": HEADS, "medusa_num_layers": 2}, old, "medusa_lm_head.pt"),
        "medusa_heads": ({}, {f"medusa_heads.{key}": tensor for key, tensor in old.items()}, "medusa_lm_head.pt"),
    }  # fmt: skip


@pytest.mark.parametrize("name", medusa_forms(Drawn()))
def test_medusa_equals_a_plain_reference(name: str, tmp_path: Path, target: ModelSpec, target_model: LanguageModel) -> None:  # fmt: skip
    forms = medusa_forms(Drawn())
    config, tensors, file = forms[name]
    own = load("medusa", save(tmp_path, config, tensors, file), target, target_model)
    assert own.most == HEADS
    everything, used = forms["blocks"][1], tensors if file.startswith("model") else forms["blocks"][1]  # fmt: skip
    blocks = [
        [(used[f"blocks.{i}.layers.{j}.weight"], used.get(f"blocks.{i}.layers.{j}.bias")) for j in range(2)]
        for i in range(HEADS)
    ]  # fmt: skip
    heads = [everything[f"lm_heads.{i}.weight"] for i in range(HEADS)]
    if "head" in name and "heads" not in name:
        heads = [heads[0] if name == "one head" else table_of(target)[1]] * HEADS
    if (ids := tensors.get("token_map")) is not None:
        assert own.target_ids_V is not None
        assert torch.equal(own.target_ids_V, ids)
        heads = [head[ids] for head in heads]
    states = Drawn(3)(5, SIZE)
    with torch.inference_mode():
        found = states
        for step, wanted in enumerate(plain.medusa(states, blocks, heads)):
            found = own(own.embed(torch.arange(5)), torch.arange(5), found, step)
            assert (own.logits(found, step) - wanted).abs().max() < CLOSE
    assert not own.attention_layers()


def test_medusa_that_does_not_fit_is_refused(tmp_path: Path, target: ModelSpec) -> None:
    config, tensors, _ = medusa_forms(Drawn())["cut heads"]
    for message, wrong in {
        r"token_map\[0\] .* is token 131": {"token_map": torch.tensor([VOCAB])},
        r"no tensor lm_heads\.0": {f"lm_heads__{i}__weight": None for i in range(HEADS)},
        r"no tensor lm_heads\.2": {"lm_heads__2__weight": None},
        r"num_heads=999999 of .* 1 to 128": {"blocks__999998__layers__0__weight": torch.zeros(1)},
        r"no tensor token_map": {"token_map": torch.tensor(3)},
        r"no tensor blocks\.0": {f"blocks__{i}__layers__{j}__weight": None for i in range(HEADS) for j in range(2)},
    }.items():  # fmt: skip
        folder = save(tmp_path, config, changed(tensors, **wrong))
        with pytest.raises(ConfigError, match=message):
            spec_for("medusa", folder, target)
    narrow = {"blocks.0.layers.0.weight": torch.zeros(32, 32)}
    with pytest.raises(ConfigError, match=r"width of .* is 32, but the target .* hidden_size=48"):
        spec_for("medusa", save(tmp_path, config, narrow), target)


# ------------------------------------------------------------------------------------ MLP speculators


@pytest.mark.parametrize(("tied", "scaled", "inner"), [(False, True, 32), (True, False, 32), (True, True, 0)])  # fmt: skip
def test_mlp_speculator_equals_a_plain_reference(
    tied: bool, scaled: bool, inner: int, tmp_path: Path, target: ModelSpec, target_model: LanguageModel
) -> None:  # fmt: skip
    drawn, size = Drawn(), inner or SIZE
    tensors: dict[str, Tensor] = {}
    for i in range(3):
        new = {
            f"emb.{i}.weight": drawn(VOCAB, size), f"proj.{i}.weight": drawn(size, size if i else SIZE),
            f"ln.{i}.weight": drawn(size), f"ln.{i}.bias": drawn(size) - 1, f"head.{i}.weight": drawn(VOCAB, size),
        }  # fmt: skip
        if tied and i:
            first = {key: tensors[key.replace(str(i), "0")] for key in new}
            new = first | {f"proj.{i}.weight": tensors.get("proj.1.weight", new[f"proj.{i}.weight"])}  # fmt: skip
        tensors |= new
    config = {"model_type": "mlp_speculator", "emb_dim": SIZE, "inner_dim": inner, "tie_weights": tied, "scale_input": scaled, "vocab_size": VOCAB, "n_predict": 3}  # fmt: skip
    stored = {f"speculator.{key}": tensor for key, tensor in tensors.items()}
    own = load("mlp_speculator", save(tmp_path, config, stored), target, target_model)
    assert own.most == 3
    assert sum(p.numel() for p in own.parameters()) == (
        sum(t.numel() for key, t in tensors.items() if not tied or ".0." in key or key == "proj.1.weight")
    )  # fmt: skip
    raw, tokens = Drawn(3)(5, SIZE), torch.arange(15).view(3, 5)
    with torch.inference_mode():
        states = own.target_states(raw)
        for step, wanted in enumerate(plain.mlp_speculator(raw, tokens, tensors, config)):
            states = own(own.embed(tokens[step], step), torch.arange(5), states, step)
            assert (own.logits(states, step) - wanted).abs().max() < CLOSE


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_predict": 1 << 40}, r"n_predict=\d+ of .* from 1 to 128"),
        ({"n_predict": "3"}, "n_predict='3' of"),
        ({"n_predict": 3}, r"no tensor emb\.0\.weight"),
    ],
)
def test_mlp_speculator_that_does_not_fit_is_refused(config: dict[str, Any], message: str, tmp_path: Path, target: ModelSpec) -> None:  # fmt: skip
    tensors = {"proj.0.weight": torch.zeros(32, SIZE), "emb.0.weight": torch.zeros(VOCAB, 32)}
    if config["n_predict"] == 3:
        del tensors["emb.0.weight"]
    with pytest.raises(ConfigError, match=message):
        spec_for("mlp_speculator", save(tmp_path, config, tensors), target)


# ------------------------------------------------------------------------------------ MTP


MTP_CASES = {
    "qwen3": Case("qwen3", "qwen3", {"tie_word_embeddings": True}),
    "qwen3_next": Case("qwen3_next", "qwen3_next", {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
    "deepseek_v3": Case("deepseek_v3", "deepseek_v3", {"num_hidden_layers": 3, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "head_dim": 8, "num_key_value_heads": 4}),
    "glm4_moe": Case("glm4_moe", "glm4_moe", {"num_hidden_layers": 3, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}),
}  # fmt: skip


def with_mtp(name: str, folder: Path) -> tuple[ModelSpec, nn.Module, nn.Module, dict[str, Tensor]]:
    """A checkpoint whose last layer has become its MTP layer: (spec, model, that layer, the tensors around it)."""
    theirs = write(MTP_CASES[name], folder)
    drawn, config = Drawn(4), json.loads((folder / "config.json").read_text())
    stored, last = load_file(folder / "model.safetensors"), config["num_hidden_layers"] - 1
    around = {"embedding": drawn(SIZE), "state": drawn(SIZE), "fc": drawn(SIZE, 2 * SIZE), "norm": drawn(SIZE)}  # fmt: skip
    if name.startswith("qwen"):
        if name == "qwen3_next":
            around |= {key: around[key] - 1 for key in ("embedding", "state", "norm")}
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        new = {f"mtp.{key}.weight": t for key, t in zip(names, around.values(), strict=True)}
        before = f"model.layers.{last}."
        new |= {key.replace(before, "mtp.layers.0."): t for key, t in stored.items() if key.startswith(before)}  # fmt: skip
        config["mtp_num_hidden_layers"] = 1
    else:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        new = {f"model.layers.{last}.{key}.weight": t for key, t in zip(names, around.values(), strict=True)}  # fmt: skip
        new[f"model.layers.{last}.shared_head.head.weight"] = stored["lm_head.weight"]
        new[f"model.layers.{last}.embed_tokens.weight"] = stored["model.embed_tokens.weight"]
        config |= {"num_nextn_predict_layers": 1, "num_hidden_layers": last}
    save(folder, config, stored | new)
    return spec_of(folder), theirs, theirs.model.layers[last], around


def mtp_reference(
    name: str, theirs: nn.Module, layer: nn.Module, around: dict[str, Tensor]
) -> Reference:
    """With the decoder layer of Transformers."""
    plus = 1.0 if name == "qwen3_next" else 0.0
    eps, head = theirs.config.rms_norm_eps, theirs.lm_head.weight
    theirs.config._attn_implementation = "eager"

    @torch.inference_mode()
    def reference(embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        if not name.startswith("qwen"):
            embeddings = torch.cat((torch.zeros(1, SIZE), embeddings[1:]))
        parts = (
            plain.norm(embeddings, around["embedding"] + plus, eps),
            plain.norm(states, around["state"] + plus, eps),
        )
        x = (torch.cat(parts, -1) @ around["fc"].T)[None]
        at = torch.arange(len(embeddings))[None]
        mask = torch.full((len(embeddings),) * 2, -torch.inf).triu(1)[None, None]
        angles = theirs.model.rotary_emb(x, at)
        x = layer(x, position_embeddings=angles, attention_mask=mask, position_ids=at)
        x = (x[0] if isinstance(x, tuple) else x)[0]
        out = plain.norm(x, around["norm"] + plus, eps)
        return out, out @ head.T

    return reference


@pytest.mark.parametrize("name", MTP_CASES)
def test_mtp_equals_a_plain_reference(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    target, theirs, layer, around = with_mtp(name, tmp_path)
    model = build_model(target, CpuPlatform())
    assert "not used" not in caplog.text, "the target skips the layer"
    own = load("mtp", tmp_path, target, model)
    assert own.model.embed_tokens is None
    assert own.lm_head is None
    assert len(own.attention_layers()) == 1
    reference = mtp_reference(name, theirs, layer, around)
    with torch.inference_mode():
        check(own, reference, theirs.model.embed_tokens.weight, Drawn(7)(LENGTH, SIZE))


def test_more_guesses_than_layers_take_the_last_layer(tmp_path: Path) -> None:
    """Two layers with equal weights: passes after the first run the second, which has keys of its own from pass 0."""
    target, theirs, layer, around = with_mtp("qwen3", tmp_path)
    stored, config = load_file(tmp_path / "model.safetensors"), dict(target.hf_config)
    again = {key.replace(".0.", ".1."): t for key, t in stored.items() if key.startswith("mtp.layers.0.")}  # fmt: skip
    save(tmp_path, config | {"mtp_num_hidden_layers": 2}, stored | again)
    target = spec_of(tmp_path)
    own = load("mtp", tmp_path, target, build_model(target, CpuPlatform()))
    reference = mtp_reference("qwen3", theirs, layer, around)
    states, table = Drawn(8)(9, SIZE), theirs.model.embed_tokens.weight
    fed = Fed(own)
    runner = Runner(fed, num_tokens=128)
    fed.states = {0: states}
    runner.prefill(0, range(8))
    first = reference(table[:8], states[:8])[0]
    before = torch.cat((first[:1], first[:-1], states[8:]))
    wanted = {0: reference(table[:9], states)[1], 1: reference(table[:9], before)[1]}
    for step in (1, 2, 0):
        runner.tokens[0], runner.computed[0], fed.step = list(range(9)), 8, step
        logits = runner.step([(0, 1)])[0]
        assert (logits[-1] - wanted[min(step, 1)][-1]).abs().max() < CLOSE
    assert (wanted[0] - wanted[1])[-1].abs().max() > 0.01


def test_checkpoints_without_mtp_are_refused(target: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="MTP of LlamaForCausalLM"):
        speculator_spec("mtp", target, target)
    write(MTP_CASES["qwen3"], tmp_path)
    alone = spec_of(tmp_path)
    with pytest.raises(ConfigError, match=r"has no MTP layers \(no tensor mtp\.fc\.weight\)"):
        speculator_spec("mtp", alone, alone)
    other = replace(alone, hf_config=alone.hf_config | {"hidden_size": 64})
    with pytest.raises(ConfigError, match=r"hidden_size=64 of .*: the target .* has 48"):
        speculator_spec("mtp", other, alone)
