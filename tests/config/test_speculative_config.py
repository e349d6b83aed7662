"""speculative_config: every form of it, what it refuses, and whether the checkpoint of a drafter fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.compat.vllm_values import SpeculativeConfig
from quire.config.flags import parse
from quire.config.from_keywords import engine_config
from quire.config.serialize import resolved_from_bytes, resolved_to_bytes
from quire.config.speculation import KEY, REFUSED, speculative_options
from quire.engine.resolve import resolve_without_weights
from quire.errors import ConfigError, Unsupported

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "dtype": "float32",
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 64}


def options(**keywords: Any) -> Any:
    config = engine_config({"model": "m", **keywords})
    return speculative_options(config.speculation.speculative_config)


@pytest.mark.parametrize(
    "keywords",
    [
        {"speculative_config": NGRAM},
        {"speculative_config": '{"method": "ngram", "num-speculative-tokens": "4"}'},
        {"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 4}},
        {"speculative_config": {"num_speculative_tokens": 4}},
        {"speculative_config": SpeculativeConfig(**NGRAM, revision=None)},
        {"spec_method": "ngram", "spec_tokens": 4},
        {"speculative_config": {"method": "ngram"}, "spec_tokens": 4},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 4},
        {"speculative_config": {**NGRAM, "draft_sample_method": "greedy", "disable_padded_drafter_batch": True}},
        {"speculative_config": NGRAM | {"method": "ngram_gpu"}},
    ],
)  # fmt: skip
def test_every_form_means_the_same(keywords: dict[str, Any]) -> None:
    found = options(**keywords)
    assert (found.method, found.num_speculative_tokens, found.adaptive) == ("ngram", 4, True)
    assert found.lookup == (5, 5)


def test_flags_and_files(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "speculative-config:\n  method: suffix\n  suffix_decoding_max_spec_factor: 2.5\n"
    )
    dotted = ["--speculative-config.method", "suffix", "--speculative-config.suffix_decoding_max_spec_factor", "2.5"]  # fmt: skip
    for argv in (dotted, ["--config", str(file)]):
        found = speculative_options(parse(argv).speculation.speculative_config)
        assert found is not None
        assert (found.method, found.suffix_decoding_max_spec_factor) == ("suffix", 2.5)
        assert found.num_speculative_tokens == 24
    old = ["--speculative-model", "[ngram]", "--num-speculative-tokens", "3", "--speculative-disable-by-batch-size", "9"]  # fmt: skip
    found = speculative_options(parse(old).speculation.speculative_config)
    assert found is not None
    assert (found.most_at(8), found.most_at(9)) == (3, 0)


def test_two_forms_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=4 and .*=5 differ"):
        options(speculative_config=NGRAM, spec_tokens=5)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (2, 4)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 7}, (7, 7)),
    ],
)
def test_lookup_lengths(keys: dict[str, int], expected: tuple[int, int]) -> None:
    found = options(speculative_config={**NGRAM, **keys})
    assert found.lookup == expected
    old = options(
        speculative_model="ngram", num_speculative_tokens=4,
        **{f"ngram_{key}": value for key, value in keys.items()},
    )  # fmt: skip
    assert old == found


def test_fewer_draft_tokens_with_more_requests() -> None:
    schedule = [[1, 4, 9], [5, 8, 2], [12, 20, 0]]
    found = options(speculative_config=NGRAM | {"num_speculative_tokens_per_batch_size": schedule})
    assert [found.most_at(count) for count in (1, 4, 5, 8, 9, 11, 12, 99)] == [4, 4, 2, 2, 2, 2, 0, 0]  # fmt: skip
    for wrong in ([[2, 4, 1]], [[1, 4, 1], [4, 5, 1]], [[1, 4]], [[1, 4, -1]]):
        with pytest.raises(ConfigError, match="num_speculative_tokens_per_batch_size"):
            options(speculative_config=NGRAM | {"num_speculative_tokens_per_batch_size": wrong})


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"num_speculative_tokens": None}, "num_speculative_tokens is missing; set it to 1 to 128"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: must be 1 to 128"),
        ({"num_speculative_tokens": 129}, "must be 1 to 128"),
        ({"num_speculative_tokens": "many"}, "speculative_config: num_speculative_tokens must be a whole number"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4"),
        ({"prompt_lookup_min": 0, "prompt_lookup_max": 3}, "prompt_lookup_min=0"),
        ({"method": "guess"}, "method='guess': choose from ngram"),
        ({"method": "ngram,guess"}, "method='guess': choose from ngram"),
        ({"method": 3}, "method=3: choose from ngram"),
        ({"method": "custom_class"}, "model=None: method custom_class"),
        ({"lookup": 1}, "speculative_config.lookup: unknown key"),
        ({"tensor_parallel_size": 1}, "use draft_tensor_parallel_size"),
        ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size=0: must be at least 1"),
        ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob=1.5: must be 0 to 1"),
        ({"suffix_decoding_max_cached_requests": -1}, "must be at least 0"),
        ({"rejection_sample_method": "never"}, "rejection_sample_method"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(keys: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        options(speculative_config={**NGRAM, **keys})


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_are_not_supported_are_named(name: str) -> None:
    with pytest.raises(Unsupported, match=f"method '{name}'.*use one of ngram"):
        options(speculative_config={"method": name, "model": "some/draft"})


def test_synthetic_acceptance_is_refused() -> None:
    for keys in ({"rejection_sample_method": "synthetic"}, {"synthetic_acceptance_length": 2}):
        with pytest.raises(Unsupported, match="synthetic acceptance"):
            options(speculative_config=NGRAM | keys)


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"model": "a/EAGLE3-b"}, "eagle3"),
        ({"model": "yuhuili/EAGLE-LLaMA3"}, "eagle"),
        ({"model": "some/draft"}, ""),
        ({"method": "qwen3_next_mtp"}, "mtp"),
        ({"method": "peagle", "model": "d"}, "eagle3"),
        ({"method": "suffix, draft_model", "model": "d"}, "suffix,draft_model"),
        ({"method": ["suffix", "eagle3"], "model": "d"}, "suffix,eagle3"),
    ],
)
def test_methods_are_detected_by_name(given: dict[str, Any], method: str) -> None:
    found = options(speculative_config=given | {"num_speculative_tokens": 3})
    assert found.method == method
    assert found.parallel_drafting == (given.get("method") == "peagle")


# -- the checkpoint of a drafter ----------------------------------------------------------------------
def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def drafter(tmp_path: Path) -> Any:
    target = folder(tmp_path / "target", LLAMA)

    def resolve(config: dict[str, Any], given: dict[str, Any] | None = None) -> Any:
        one = folder(tmp_path / f"draft{len(list(tmp_path.iterdir()))}", config)
        asked = {"model": one, "num_speculative_tokens": 3} | (given or {})
        made = engine_config({"model": target, "speculative_config": asked, "skip_tokenizer_init": True})  # fmt: skip
        resolved, fetch = resolve_without_weights(made)
        fetch()
        return resolved

    return resolve


def test_a_drafter_that_fits(drafter: Any) -> None:
    found = drafter(LLAMA | {"num_hidden_layers": 1})
    assert found.speculation.method == "draft_model"
    assert found.draft_spec.hf_config["num_hidden_layers"] == 1
    assert found.draft_spec.path == found.draft.path != found.path
    assert found.draft_spec.dtype == found.spec.dtype
    assert resolved_from_bytes(resolved_to_bytes(found)) == found
    assert drafter(EAGLE3).speculation.method == "eagle3"
    assert drafter({"model_type": "medusa", "hidden_size": 32}).speculation.method == "medusa"
    assert drafter(LLAMA, {"max_model_len": 99, "dtype": "bfloat16"}).draft_spec.max_model_len == 99
    assert drafter(LLAMA | {"vocab_size": 65}, {"use_heterogeneous_vocab": True}).draft is not None
    heads = {"model_type": "mlp_speculator", "n_predict": 2}
    assert drafter(heads, {"num_speculative_tokens": None}).speculation.num_speculative_tokens == 2


@pytest.mark.parametrize(
    ("config", "given", "names"),
    [
        (LLAMA | {"vocab_size": 65}, {}, r"vocabulary \(65 tokens\) differs from .*64 tokens.* use_heterogeneous_vocab"),
        (LLAMA | {"max_position_embeddings": 99}, {}, r"context is 99 tokens .*--max-model-len 99, or .*max_model_len=99"),
        (LLAMA, {"max_model_len": 999}, "max_model_len=999 is more than the 512 tokens"),
        (LLAMA, {"dtype": "int3"}, "dtype=int3: choose from auto, float32"),
        ({"model_type": "mlp_speculator", "n_predict": 2}, {}, "predicts 2 tokens; use at most 2"),
        (LLAMA, {"num_speculative_tokens": None}, "num_speculative_tokens is missing"),
        (LLAMA | {"speculators_model_type": "dflash"}, {}, "method 'dflash'"),
    ],
)  # fmt: skip
def test_a_drafter_that_does_not_fit_is_refused(
    drafter: Any, config: dict[str, Any], given: dict[str, Any], names: str
) -> None:
    with pytest.raises((ConfigError, Unsupported), match=names):
        drafter(config, given)


def test_a_checkpoint_of_speculators_as_the_main_model(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", LLAMA)
    says = {"algorithm": "eagle3", "verifier": {"name_or_path": target}, "proposal_methods": [{"speculative_tokens": 5}]}  # fmt: skip
    heads = folder(
        tmp_path / "heads",
        {"speculators_model_type": "eagle3", "speculators_config": says, "transformer_layer_config": LLAMA},
    )  # fmt: skip
    asked = engine_config({"model": heads, "skip_tokenizer_init": True})
    resolved, _ = resolve_without_weights(asked)
    assert (resolved.path, resolved.draft.path) == (target, heads)
    assert resolved.config.model.served_names == [heads]
    assert (resolved.speculation.method, resolved.speculation.num_speculative_tokens) == ("eagle3", 5)  # fmt: skip
    asked = engine_config({"model": heads, "skip_tokenizer_init": True, "spec_tokens": 2})
    assert resolve_without_weights(asked)[0].speculation.num_speculative_tokens == 2
    del says["verifier"]
    (Path(heads) / "config.json").write_text(json.dumps({"speculators_config": says}))
    with pytest.raises(ConfigError, match="names no model to serve"):
        resolve_without_weights(asked)


def test_metrics_of_a_request_need_speculation(tmp_path: Path) -> None:
    keywords = {"model": folder(tmp_path / "m", LLAMA), "skip_tokenizer_init": True, "per_request_spec_decode_metrics": "summary"}  # fmt: skip
    with pytest.raises(ConfigError, match=f"per_request_spec_decode_metrics=summary: .*set {KEY}"):
        resolve_without_weights(engine_config(keywords))


def test_the_embedded_model_has_drafters() -> None:
    asked = engine_config({"model": "quire-tiny", "speculative_config": {"method": "draft_model"}})
    resolved, _ = resolve_without_weights(asked)
    assert Path(resolved.draft.path).name == "quire-tiny-draft"
    assert resolved.speculation.num_speculative_tokens == 3
    asked = engine_config({"model": "quire-tiny", "speculative_config": {"method": "medusa"}})
    with pytest.raises(ConfigError, match="model is missing: method medusa needs a checkpoint"):
        resolve_without_weights(asked)


def test_models_with_a_cache_of_their_own_are_refused_before_weights_are_read(
    drafter: Any, tmp_path: Path
) -> None:
    own = {"architectures": ["XGLMForCausalLM"], "model_type": "xglm"}
    with pytest.raises(
        ConfigError,
        match=r"draft\d runs on Transformers with a cache of its own \(.*take tokens back",
    ):
        drafter(LLAMA | own)
    target = folder(tmp_path / "own", LLAMA | own)
    made = engine_config(
        {"model": target, "speculative_config": NGRAM, "skip_tokenizer_init": True}
    )
    with pytest.raises(ConfigError, match=r"speculative_config: XGLMForCausalLM runs on .* leave"):
        resolve_without_weights(made)


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (["fc.weight", "layers.0.self_attn.q_proj.weight"], "eagle"),
        (["fc.weight", "midlayer.hidden_norm.weight", "d2t"], "eagle3"),
        (["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"], "draft_model"),
    ],
)
def test_heads_with_the_config_of_a_llama_are_detected(
    drafter: Any, tmp_path: Path, names: list[str], method: str
) -> None:
    from safetensors.numpy import save_file

    checkpoint = Path(folder(tmp_path / "heads", LLAMA | {"num_hidden_layers": 1}))
    save_file(dict.fromkeys(names, np.zeros(1, np.float32)), checkpoint / "model.safetensors")
    assert drafter(LLAMA, {"model": str(checkpoint)}).speculation.method == method
    assert drafter(LLAMA | {"draft_vocab_size": 9}).speculation.method == "eagle3"
