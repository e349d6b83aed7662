"""SPLADE, BGE-M3, ColBERT and InternLM 2 rewards: the numbers of plain computations with Transformers' models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import engine, greedy, make_checkpoint, prompts
from equality.pooling_models import edit_config, make_pooling_checkpoint, run
from safetensors.torch import load_file, save_file

from quire.errors import ConfigError, Unsupported
from quire.protocol.pooling_params import PoolingParams

GIVEN = [[*prompt, 7] for prompt in prompts(4, longest=80)]
EMBED = PoolingParams(task="embed")


def close(found: list[Any], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(one.copy()), other, atol=2e-5, rtol=1e-4)


def write_modules(folder: Path, transformer: str, pooling: dict[str, Any] | None) -> None:
    """modules.json of a sparse encoder, and the configuration of its pooling."""
    kinds = [("", transformer), ("1_SpladePooling", "sparse_encoder.models.SpladePooling")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(kinds[: 1 if pooling is None else 2])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    task = {"transformer_task": "fill-mask", "max_seq_length": 120}
    (folder / "sentence_bert_config.json").write_text(json.dumps(task))
    if pooling is not None:
        (folder / "1_SpladePooling").mkdir(exist_ok=True)
        (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(pooling))


def weights(model: Any, prompt: list[int], how: dict[str, Any]) -> torch.Tensor:
    found = model(torch.tensor([prompt])).logits[0].relu().log1p()
    if how.get("activation_function") == "log1p_relu":
        found = found.log1p()
    return found.amax(0) if how.get("pooling_strategy", "max") == "max" else found.sum(0)


SPLADES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bert": ({}, {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None}),
    "distilbert": ({"dim": 64, "hidden_dim": 96, "n_heads": 4, "n_layers": 2}, {"activation_function": "log1p_relu"}),
    "xlm-roberta": ({}, {"pooling_strategy": "sum"}),
    "modernbert": ({"tie_word_embeddings": False}, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPLADES)
def test_splade_is_that_of_its_masked_language_model(kind: str, tmp_path: Path) -> None:
    more, how = SPLADES[kind]
    path, model = make_pooling_checkpoint(kind, tmp_path, "AutoModelForMaskedLM", **more)
    write_modules(tmp_path, "sparse_encoder.models.MLMTransformer", how)
    with torch.inference_mode(), engine(path, max_model_len=None) as one:
        info = one.client.ready.pooling
        assert info is not None
        assert (info.tasks, info.num_dimensions, info.normalizes) == (["embed"], 211, False)
        assert info.similarity == "dot"
        found = run(one, GIVEN, EMBED)
        close(found, [weights(model, prompt, how) for prompt in GIVEN])
        alone = [run(one, [prompt], EMBED)[0].tobytes() for prompt in reversed(GIVEN)]
        assert [each.tobytes() for each in found] == alone[::-1]


def test_splade_by_name_of_the_architecture(tmp_path: Path) -> None:
    path, model = make_pooling_checkpoint("bert", tmp_path, "AutoModelForMaskedLM")
    overrides = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    with torch.inference_mode(), engine(path, hf_overrides=overrides) as one:
        close(run(one, GIVEN, EMBED), [weights(model, prompt, {}) for prompt in GIVEN])


def test_a_masked_language_model_that_cannot_be_splade_is_refused(tmp_path: Path) -> None:
    path, _ = make_pooling_checkpoint("bert", tmp_path, "AutoModelForMaskedLM")

    def refused(kind: type[Exception], match: str, how: dict[str, Any] | None) -> None:
        write_modules(tmp_path, "base.modules.Transformer", how)
        with pytest.raises(kind, match=match), engine(path):
            pass

    refused(Unsupported, "without a module SpladePooling", None)
    refused(ConfigError, "pooling_strategy='median': known are max, sum", {"pooling_strategy": "median"})  # fmt: skip
    about = tmp_path / "config_sentence_transformers.json"
    about.write_text(json.dumps({"similarity_fn_name": "hamming"}))
    refused(ConfigError, "similarity_fn_name='hamming': known are cosine, dot", {})
    about.unlink()
    edit_config(path, hidden_act="relu")
    refused(Unsupported, "SPLADE with BertForMaskedLM relu", {})


def test_a_router_serves_its_default_route(tmp_path: Path) -> None:
    """As opensearch's sparse encoders: documents by the model, queries by a table, which is not served."""
    path, model = make_pooling_checkpoint("distilbert", tmp_path, "AutoModelForMaskedLM", **SPLADES["distilbert"][0])  # fmt: skip
    write_modules(tmp_path, "base.modules.Router", {"activation_function": "log1p_relu"})
    listed = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps(listed[:1]))

    def route(**parameters: Any) -> None:
        kinds = {
            "": "MLMTransformer",
            "1_SpladePooling": "SpladePooling",
            "query_0_SparseStaticEmbedding": "SparseStaticEmbedding",
        }
        routes = {"query": ["query_0_SparseStaticEmbedding"], "document": ["", "1_SpladePooling"]}
        types = {
            name: f"sentence_transformers.sparse_encoder.models.{kind}"
            for name, kind in kinds.items()
        }
        written = {"types": types, "structure": routes, "parameters": parameters}
        (tmp_path / "router_config.json").write_text(json.dumps(written))

    route(default_route="document")
    with torch.inference_mode(), engine(path) as one:
        want = [weights(model, prompt, {"activation_function": "log1p_relu"}) for prompt in GIVEN]
        close(run(one, GIVEN, EMBED), want)
    for parameters, match in (
        ({}, "without default_route"),
        ({"default_route": "query"}, "SparseStaticEmbedding"),
    ):
        route(**parameters)
        with pytest.raises(Unsupported, match=match), engine(path):
            pass


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.nn.Linear]]:
    """A BGE-M3: an XLM-RoBERTa with two layers beside it."""
    folder = tmp_path_factory.mktemp("m3")
    more = {"bos_token_id": 3, "eos_token_id": 7}
    _, model = make_pooling_checkpoint("xlm-roberta", folder, **more)
    heads = {"sparse": torch.nn.Linear(64, 1), "colbert": torch.nn.Linear(64, 64)}
    for name, head in heads.items():
        torch.save(head.state_dict(), folder / f"{name}_linear.pt")
    return folder, model, heads


def test_bge_m3_has_sparse_weights_and_vectors_of_tokens(m3) -> None:
    folder, model, heads = m3
    given = [[3, *prompt] for prompt in GIVEN]  # they end with 7
    with torch.inference_mode(), engine(str(folder)) as one:
        info = one.client.ready.pooling
        assert info is not None
        assert info.tasks == ["embed", "token_embed", "token_classify"]
        assert (info.num_dimensions, info.num_labels) == (64, 1)
        states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in given]
        unit = torch.nn.functional.normalize
        close(run(one, given, EMBED), [unit(each[0], dim=0) for each in states])
        tokens = PoolingParams(task="token_embed", skip_reading_prefix_cache=True)
        close(run(one, given, tokens), [unit(heads["colbert"](each[1:]), dim=1) for each in states])
        sparse = PoolingParams(task="token_classify", skip_reading_prefix_cache=True)
        close(run(one, given, sparse), [heads["sparse"](each[1:-1]).relu() for each in states])
        bare = [prompt[:-1] for prompt in GIVEN[1:]]  # without the special tokens all count
        states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in bare]
        close(run(one, bare, sparse), [heads["sparse"](each).relu() for each in states])


def test_a_damaged_layer_of_bge_m3_is_named(m3, tmp_path: Path) -> None:
    folder = shutil.copytree(m3[0], tmp_path / "m3")
    torch.save(torch.nn.Linear(64, 2).state_dict(), folder / "sparse_linear.pt")
    with pytest.raises(ConfigError, match=r"shape \[2, 64\], but sparse_linear.pt requires \[1, 64\]"), engine(str(folder)):  # fmt: skip
        pass
    (folder / "sparse_linear.pt").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(ConfigError, match="cannot be read"), engine(str(folder)):
        pass


def test_the_projection_of_colbert(tmp_path: Path) -> None:
    path, model = make_pooling_checkpoint("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    projection = torch.randn(24, 64)
    save_file(
        {**{f"bert.{name}": one for name, one in tensors.items()}, "linear.weight": projection},
        tmp_path / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    edit_config(path, architectures=["HF_ColBERT"])
    (tmp_path / "artifact.metadata").write_text(json.dumps({"dim": 24}))
    params = PoolingParams(task="token_embed", skip_reading_prefix_cache=True)
    with torch.inference_mode(), engine(path) as one:
        info = one.client.ready.pooling
        assert info is not None
        assert (info.tasks, info.num_dimensions) == (["token_embed"], 24)
        states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in GIVEN]
        unit = torch.nn.functional.normalize
        close(run(one, GIVEN, params), [unit(each @ projection.T, dim=1) for each in states])


def as_internlm2(folder: Path, kv_heads: int, head: torch.Tensor | None) -> None:
    """Rename the tensors of a Llama checkpoint, and join its queries, keys and values by group; add a reward head."""
    found = load_file(folder / "model.safetensors")
    old = {"embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm",
           "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
           "mlp.down_proj": "feed_forward.w2", "lm_head": "output"}  # fmt: skip
    made = {}
    for name, tensor in found.items():
        for ours, theirs in old.items():
            name = name.replace(ours, theirs)
        if "self_attn" not in name:
            made[name] = tensor
    for name in [name for name in found if ".q_proj." in name]:
        parts = [found[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        groups = torch.cat([one.unflatten(0, (kv_heads, -1)) for one in parts], 1)
        made[name.replace("self_attn.q_proj", "attention.wqkv")] = groups.flatten(0, 1).contiguous()
    if head is not None:
        del made["output.weight"]
        made["v_head.weight"] = head
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(str(folder), model_type="internlm2", bias=False, architectures=["InternLM2ForCausalLM" if head is None else "InternLM2ForRewardModel"])  # fmt: skip


def test_internlm2_is_llama_under_other_names(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "llama")
    shutil.copytree(tmp_path / "llama", tmp_path / "own")
    kv_heads = json.loads((tmp_path / "llama" / "config.json").read_text())["num_key_value_heads"]
    as_internlm2(tmp_path / "own", kv_heads, None)
    answers = []
    for name in ("llama", "own"):
        with engine(str(tmp_path / name)) as one:
            answers.append(one.tokens(GIVEN, greedy(6)))
    assert answers[0] == answers[1]


def test_rewards_of_internlm2(tmp_path: Path) -> None:
    path, model = make_pooling_checkpoint("llama", tmp_path, "AutoModelForCausalLM")
    head = torch.randn(1, 64)
    as_internlm2(tmp_path, model.config.num_key_value_heads, head)
    params = PoolingParams(task="token_classify", skip_reading_prefix_cache=True)
    with torch.inference_mode(), engine(path) as one:
        info = one.client.ready.pooling
        assert info is not None
        assert (info.tasks, info.num_labels) == (["token_classify"], 1)
        states = [model.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in GIVEN]
        close(run(one, GIVEN, params), [each @ head.T for each in states])
