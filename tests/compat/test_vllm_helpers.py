"""Helpers of vLLM that its example programs import: vectors as bytes, files of a repository, prompts of a benchmark."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from safetensors.torch import load

from quire.compat import vllm_datasets, vllm_repo, vllm_tensors
from quire.compat.vllm_values import print_embeddings
from quire.config.flags import FlagParser
from quire.errors import ConfigError
from quire.server.pooling.vectors import VectorEncoding

VECTOR = torch.tensor([0.5, -1.25, 3.0, 448.0])


def test_print_embeddings(capsys):
    print_embeddings([0.5, 1.0, -2.0, 3.0, 4.0], prefix="Vector")
    print_embeddings([0.5])
    assert capsys.readouterr().out == "Vector: [0.5, 1.0, -2.0, 3.0, ...] (size=5)\nEmbeddings: [0.5] (size=1)\n"  # fmt: skip


@pytest.mark.parametrize("endianness", vllm_tensors.ENDIANNESS)
@pytest.mark.parametrize("dtype", vllm_tensors.EMBED_DTYPES)
def test_a_program_reads_the_servers_bytes(dtype, endianness):
    """Every number of the vector is exact in each format, so the same numbers come back."""
    encoding = VectorEncoding("bytes_only", dtype, endianness)
    rows = VECTOR.repeat(2, 1)
    body = b"".join(encoding.encoded(row) for row in rows.numpy())
    items = vllm_tensors.build_metadata_items(dtype, endianness, (4,), 2)
    assert (items[1].start, items[1].end) == (len(body) // 2, len(body))
    vectors = vllm_tensors.decode_pooling_output(items[::-1], body)
    assert torch.equal(torch.stack(vectors).float(), rows)
    assert vllm_tensors.tensor2binary(rows, dtype, endianness) == body


def test_unknown_formats_are_errors():
    with pytest.raises(ValueError, match="embed_dtype='int3': choose from float32"):
        vllm_tensors.tensor2binary(VECTOR, "int3", "big")
    with pytest.raises(ValueError, match="endianness='middle'"):
        vllm_tensors.binary2tensor(b"", (0,), "float32", "middle")


def test_tensors_travel_without_pickle():
    file = base64.b64decode(vllm_tensors.tensor2base64(VECTOR.reshape(2, 2).T))
    (tensor,) = load(file).values()
    assert torch.equal(tensor, VECTOR.reshape(2, 2).T)
    array = base64.b64decode(vllm_tensors.numpy2base64(np.arange(3)))
    assert array.startswith(b"\x93NUMPY")


def test_files_of_a_directory(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "part" / "model.safetensors").write_bytes(b"x")
    folder = str(tmp_path)
    assert sorted(vllm_repo.list_repo_files(folder)) == ["config.json", "part/model.safetensors"]
    assert vllm_repo.list_filtered_repo_files(folder, ["*.bin", "*.safetensors"]) == ["part/model.safetensors"]  # fmt: skip
    assert vllm_repo.file_exists(folder, "config.json")
    assert not vllm_repo.file_exists(folder, "model.safetensors")
    assert vllm_repo.get_hf_file_to_dict("config.json", folder) == {"a": 1}
    assert vllm_repo.get_hf_file_to_dict("none.json", folder) is None
    assert vllm_repo.get_model_path(folder) == folder


def test_files_of_the_local_cache(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--someone--adapter" / "snapshots" / "c0"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--someone--adapter" / "refs").mkdir()
    (tmp_path / "models--someone--adapter" / "refs" / "main").write_text("c0")
    (snapshot / "adapter_config.json").write_text('{"r": 4}')
    folder = vllm_repo.hf_api().snapshot_download(
        "someone/adapter", cache_dir=tmp_path, local_files_only=True
    )
    assert vllm_repo.get_hf_file_to_dict("adapter_config.json", folder) == {"r": 4}
    assert vllm_repo.list_repo_files("someone/adapter") == []  # offline: the hub cannot be asked
    assert vllm_repo.get_hf_file_bytes("config.json", "someone/other") is None


def samples(*words):
    from quire.compat.vllm_chat import get_tokenizer

    parser = FlagParser()
    vllm_datasets.add_dataset_parser(parser)
    parser.add_argument("--output-len", type=int, default=3)  # a flag of the program itself
    args = parser.parse_args(["--num-prompts", "2", *words])
    tokenizer = get_tokenizer("quire-tiny")
    return vllm_datasets.get_samples(args, tokenizer), tokenizer


def test_prompts_of_a_benchmark(tmp_path):
    prompts, tokenizer = samples("--random-input-len", "12", "--random_output_len", "5")
    assert [len(tokenizer.encode(prompt.prompt)) for prompt in prompts] == [12, 12]
    assert [(prompt.prompt_len, prompt.expected_output_len) for prompt in prompts] == [(12, 5)] * 2
    assert prompts[0].prompt != prompts[1].prompt
    assert prompts == samples("--random-input-len", "12", "--random-output-len", "5")[0]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once"}\n{"prompt": "upon"}\n')
    words = ("--dataset-name", "custom", "--dataset-path", str(file), "--disable-shuffle")
    assert [prompt.prompt for prompt in samples(*words)[0]] == ["Once", "upon"]
    with pytest.raises(ConfigError, match="--dataset-name hf: choose from"):
        samples("--dataset-name", "hf")
