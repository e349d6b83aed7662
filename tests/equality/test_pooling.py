"""Vectors and scores of the engine equal sentence-transformers and Transformers, and its own bits beside any other requests."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equality.engines import engine, prompts
from equality.pooling_models import edit_config, make_pooling_checkpoint, run, text
from equality.sentence_directories import CASES

from quire.errors import ConfigError, Unsupported
from quire.protocol.pooling_params import PoolingParams

GIVEN = [[*prompt, 7] for prompt in prompts(6, longest=50)]
EMBED = PoolingParams(task="embed", skip_reading_prefix_cache=True)


def classified(auto: str = "AutoModelForSequenceClassification", **more: Any) -> dict[str, Any]:
    return {"auto": auto, "pad_token_id": 0, **more}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pooling_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3_model"))[0]


@pytest.fixture(scope="module")
def bert_pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert_pairs")
    return make_pooling_checkpoint("bert", folder, **classified(num_labels=1))[0]


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pooling_checkpoint(
        "bert", tmp_path_factory.mktemp("masked"), "AutoModelForMaskedLM"
    )[0]


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, qwen3: str, bert_pairs: str, masked: str
) -> Path:
    """The directories of `sentence_directories.py`, and its numbers."""
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    into = tmp_path_factory.mktemp("sentences")
    program = Path(__file__).with_name("sentence_directories.py")
    texts = json.dumps([text(prompt) for prompt in GIVEN])
    command = [sys.executable, str(program), qwen3, bert_pairs, masked, str(into)]
    done = subprocess.run(command, input=texts, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return into


def close(found: list[np.ndarray], expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, np.asarray(other), atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_sentence_transformers(name: str, saved: Path) -> None:
    after = CASES[name][1]
    expected = np.load(saved / f"{name}.npy")
    with engine(str(saved / name), max_model_len=None) as one:
        info = one.client.ready.pooling
        assert info is not None
        assert (one.client.ready.max_model_len, info.num_dimensions) == (60, expected.shape[1])
        assert (info.tasks, info.prompts["query"]) == (["embed", "token_embed"], "w5 w6")
        assert info.normalizes == (after[-1:] == ("normalize",))
        assert info.cached_tasks == (["embed"] if CASES[name][0] == "lasttoken" else [])
        found = run(one, GIVEN, EMBED)
        close(found, expected)
        if info.normalizes:
            raw = PoolingParams(task="embed", use_activation=False, skip_reading_prefix_cache=True)
            for unit, whole in zip(found, run(one, GIVEN, raw), strict=True):
                assert np.linalg.norm(whole) != pytest.approx(1, abs=1e-3)
                np.testing.assert_allclose(whole / np.linalg.norm(whole), unit, atol=1e-6)


def test_scores_are_those_of_a_cross_encoder(saved: Path) -> None:
    expected = np.load(saved / "cross.npy")
    with engine(str(saved / "cross")) as one:
        info = one.client.ready.pooling
        assert info is not None
        assert (info.tasks[0], info.num_labels) == ("classify", 1)
        pairs = list(zip(GIVEN, reversed(GIVEN), strict=True))
        # the tokenizer of these tests puts no separators, and all token types are 0
        found = run(one, [a + b for a, b in pairs], PoolingParams(task="classify"))
        close(found, expected[:, None])


def test_sparse_vectors_are_those_of_sentence_transformers(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = np.load(saved / "sparse.npy")
    with engine(str(saved / "sparse"), max_model_len=None) as one:
        info = one.client.ready.pooling
        assert info is not None
        assert info.tasks == ["embed"]
        assert "not used" not in caplog.text
        close(run(one, GIVEN, EMBED), expected)


HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "AutoModelForSequenceClassification", {"num_labels": 5}),
    "llama tokens": ("llama", "AutoModelForTokenClassification", {"num_labels": 3}),
    "bert": ("bert", "AutoModelForSequenceClassification", {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "bert tokens": ("bert", "AutoModelForTokenClassification", {"num_labels": 4}),
    "xlm-roberta": ("xlm-roberta", "AutoModelForSequenceClassification", {"num_labels": 2}),
    "distilbert": ("distilbert", "AutoModelForSequenceClassification", {"num_labels": 2, "dim": 64, "hidden_dim": 96, "n_heads": 4, "n_layers": 2}),
    "mpnet": ("mpnet", "AutoModelForSequenceClassification", {"num_labels": 2}),
    "modernbert": ("modernbert", "AutoModelForSequenceClassification", {"num_labels": 3, "classifier_pooling": "mean", "problem_type": "regression"}),
    "modernbert tokens": ("modernbert", "AutoModelForTokenClassification", {"num_labels": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, auto, more = HEADS[name]
    path, model = make_pooling_checkpoint(kind, tmp_path, auto, **more)
    task = "token_classify" if "Token" in auto else "classify"
    params = PoolingParams(task=task, skip_reading_prefix_cache=True)
    given = [prompt for prompt in GIVEN if len(prompt) > 1]
    with torch.inference_mode(), engine(path) as one:
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in given]
        how = {"multi_label_classification": torch.sigmoid, "regression": lambda x: x}
        act = how.get(str(more.get("problem_type")), lambda x: x.softmax(-1))
        assert one.client.resolved.pooling is not None
        assert one.client.resolved.pooling.info.tasks[0] == task
        close(run(one, given, params), [act(each) for each in logits])
        raw = PoolingParams(task=task, use_activation=False, skip_reading_prefix_cache=True)
        close(run(one, given, raw), logits)


def alone(path: str, params: PoolingParams, **settings: Any) -> list[bytes]:
    with engine(path, **settings) as one:
        return [run(one, [prompt], params)[0].tobytes() for prompt in GIVEN]


@pytest.mark.parametrize("mode", ["LAST", "MEAN", "WEIGHTEDMEAN", "ALL", "scores"])
def test_bits_do_not_depend_on_company_chunks_or_depth(mode: str, qwen3: str) -> None:
    task = {"ALL": "token_embed", "scores": "classify"}.get(mode, "embed")
    settings: dict[str, Any] = {"convert": "embed", "load_format": "auto"}
    if mode == "scores":
        settings = {"convert": "classify", "load_format": "dummy"}
    elif mode != "ALL":
        settings["pooler_config"] = {"seq_pooling_type": mode}
    params = PoolingParams(task=task, skip_reading_prefix_cache=True)
    expected = alone(qwen3, params, **settings)
    order = [5, 0, 3, 1, 4, 2]
    for more in (
        {"depth": 1},
        {"depth": 3, "max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"depth": 2, "max_num_batched_tokens": 13, "num_gpu_blocks_override": 9, "block_size": 8},
    ):
        with engine(qwen3, **settings, **more) as one:
            found = run(one, [GIVEN[index] for index in order], params)
            assert [each.tobytes() for each in found] == [expected[index] for index in order]


def test_a_cached_instruction_gives_the_same_vector(qwen3: str) -> None:
    shared = list(range(10, 74))
    given = [[*shared, *prompt] for prompt in GIVEN]
    settings = {"runner": "pooling", "block_size": 16}
    with engine(qwen3, **settings, enable_prefix_caching=False) as one:
        expected = [each.tobytes() for each in run(one, given, PoolingParams(task="embed"))]
    with engine(qwen3, **settings) as one:
        for again in range(2):
            found = [run(one, [prompt], PoolingParams(task="embed"))[0] for prompt in given]
            assert [each.tobytes() for each in found] == expected, again
        assert one.stats()["prefix_hits"] > 0
        with pytest.raises(RuntimeError, match="skip_reading_prefix_cache"):
            run(one, [given[0]], PoolingParams(task="token_embed"))
        tokens = PoolingParams(task="token_embed", skip_reading_prefix_cache=True)
        assert run(one, [given[0]], tokens)[0].shape == (len(given[0]), 64)


def test_a_reranker_from_two_tokens_is_their_softmax(tmp_path: Path) -> None:
    path, model = make_pooling_checkpoint("qwen3", tmp_path, "AutoModelForCausalLM")
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["w9", "w8"],
        "is_original_qwen3_reranker": True,
    }
    with torch.inference_mode(), engine(path, hf_overrides=overrides) as one:
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in GIVEN]
        found = run(one, GIVEN, PoolingParams(task="classify"))
        close(found, [each[[9, 8]].softmax(-1)[1:] for each in logits])
        info = one.client.ready.pooling
        assert info is not None
        assert (info.num_labels, info.use_sep_token) == (1, False)
    plain = {**overrides, "classifier_from_token": [8], "method": "no_post_processing"}
    with torch.inference_mode(), engine(path, hf_overrides=plain) as one:
        raw = PoolingParams(task="classify", use_activation=False)
        close(run(one, GIVEN, raw), [each[[8]] for each in logits])


def test_bidirectional_decoders_are_those_of_transformers(tmp_path: Path) -> None:
    more = {"use_bidirectional_attention": True, "sliding_window": 24, "tie_word_embeddings": True}
    path, model = make_pooling_checkpoint("gemma3_text", tmp_path, num_hidden_layers=4, **more)
    long = [[*prompt, *prompt, *prompt] for prompt in GIVEN]
    settings = {"pooler_config": {"pooling_type": "MEAN"}, "max_model_len": 200}
    with torch.inference_mode(), engine(path, **settings) as one:
        assert not one.client.resolved.chunked_prefill
        states = [model(torch.tensor([prompt])).last_hidden_state[0].mean(0) for prompt in long]
        found = run(one, long, PoolingParams(task="embed"))
        close(found, [torch.nn.functional.normalize(state, dim=0) for state in states])


def test_process_rewards_are_at_the_step_tokens(tmp_path: Path) -> None:
    path, model = make_pooling_checkpoint("qwen3", tmp_path, "AutoModelForTokenClassification", num_labels=2)  # fmt: skip
    given = [[5, 6, 9, 7, 8, 9, 9], [5, 9], [5, 6, 7]]
    config = {"tok_pooling_type": "STEP", "step_tag_id": 9}
    params = PoolingParams(task="token_classify", skip_reading_prefix_cache=True)
    with torch.inference_mode(), engine(path, pooler_config=config) as one:
        logits = [model(torch.tensor([prompt])).logits[0].softmax(-1) for prompt in given]
        found = run(one, given, params)
        places = [[i for i, token in enumerate(prompt) if token == 9] for prompt in given]
        close(found, [each[place] for each, place in zip(logits, places, strict=True)])
        some = PoolingParams(task="token_classify", step_tag_id=6, returned_token_ids=[1], use_activation=False, skip_reading_prefix_cache=True)  # fmt: skip
        raw = model(torch.tensor([given[0]])).logits[0]
        close(run(one, given[:1], some), [raw[1:2, 1:]])


def test_process_rewards_from_tokens_of_a_model_that_generates(tmp_path: Path) -> None:
    path, model = make_pooling_checkpoint("llama", tmp_path, "AutoModelForCausalLM")
    config = {"pooling_type": "STEP", "step_tag_id": 9, "returned_token_ids": [8, 12, 5]}
    params = PoolingParams(task="token_classify", skip_reading_prefix_cache=True)
    given = [5, 6, 9, 7, 8, 9]
    with torch.inference_mode(), engine(path, runner="pooling", pooler_config=config) as one:
        logits = model(torch.tensor([given])).logits[0]
        close(run(one, [given], params), [logits[[2, 5]][:, [8, 12, 5]].softmax(-1)])


def test_vectors_are_cut_before_they_are_normalized(qwen3: str, tmp_path: Path) -> None:
    folder = str(shutil.copytree(qwen3, tmp_path / "cut"))
    edit_config(folder, matryoshka_dimensions=[16, 32])
    raw = PoolingParams(task="embed", use_activation=False)
    with engine(folder) as one:
        whole = run(one, GIVEN, raw)
        cut = run(one, GIVEN, PoolingParams(task="embed", dimensions=16))
        close(cut, [each[:16] / np.linalg.norm(each[:16]) for each in whole])
    with pytest.raises(ConfigError, match="16, 32"), engine(folder, pooler_config={"dimensions": 20}):  # fmt: skip
        pass
    with engine(folder, pooler_config={"dimensions": 32}) as one:
        assert run(one, GIVEN[:1], EMBED)[0].shape == (32,)


def test_what_cannot_be_computed_is_refused(qwen3: str, saved: Path, tmp_path: Path) -> None:
    def refused(kind: type[Exception], match: str, folder: str, **settings: Any) -> None:
        with pytest.raises(kind, match=match), engine(folder, **settings):
            pass

    refused(ConfigError, "lacks score.weight", qwen3, convert="classify")
    refused(ConfigError, "runner=generate", qwen3, runner="generate", convert="embed")
    refused(ConfigError, "pooler_config.normalize: .*use_activation", qwen3, pooler_config={"normalize": True})  # fmt: skip
    refused(ConfigError, "offers embed, token_embed", qwen3, pooler_config={"task": "classify"})
    folder = tmp_path / "projected"
    shutil.copytree(saved / "projected", folder)
    (folder / "2_Dense" / "model.safetensors").unlink()
    refused(Exception, "2_Dense has no weights", str(folder))
    listed = json.loads((folder / "modules.json").read_text())
    listed[2]["type"] = "sentence_transformers.models.LSTM"
    (folder / "modules.json").write_text(json.dumps(listed))
    refused(Unsupported, "sentence_transformers.models.LSTM", str(folder))
