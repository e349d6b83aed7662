"""Mistral's own files against the Hugging Face checkpoints that they were made of; tokenizers, and damaged files."""

from __future__ import annotations

import base64
import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.errors import ModelNotFound, QuireError, Unsupported
from quire.frontend.tokenizer import load as load_tokenizer
from quire.models import checkpoint_locator
from quire.models.mistral.folder import with_tokenizer_json
from quire.models.mistral.params import read_params
from quire.models.mistral.tekken import TekkenTokenizer
from quire.models.mistral.tensors import usual_name
from tests.models.cases import CASES, MOE, Case, write
from tests.models.harness import Runner
from tests.models.test_gguf import build

TEXT = list(range(3, 60))
ROPE = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
TESTED = [
    Case("mistral", "mistral", {"sliding_window": None}),
    Case("mistral window", "mistral", {"sliding_window": 5, "tie_word_embeddings": True}),
    Case("mixtral", "mixtral", {**MOE, "num_local_experts": 6, "sliding_window": None}),
    Case("ministral3", "ministral3", {"rope_parameters": ROPE}),
]
NAMES = {
    "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe": "feed_forward",
}  # fmt: skip


def mistral_copy(folder: Path, to: Path) -> Path:
    """Its params.json and consolidated.safetensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors, heads = {}, {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if count := config.get(heads.get(name.split(".")[-2], "")):
            tensor = (
                tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            )
        called = name
        for usual, own in NAMES.items():
            called = called.replace(usual, own)
        assert usual_name(called) == name
        tensors[called] = tensor.contiguous()
    to.mkdir(exist_ok=True)
    save_file(tensors, to / "consolidated.safetensors")
    rope = config["rope_parameters"]
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "hidden_dim": config["intermediate_size"],
        "head_dim": config["head_dim"], "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"], "vocab_size": config["vocab_size"], "rope_theta": rope["rope_theta"],
        "max_seq_len": config["max_position_embeddings"], "tied_embeddings": config["tie_word_embeddings"],
        "sliding_window": config.get("sliding_window"),
    }  # fmt: skip
    if "num_local_experts" in config:
        params["moe"] = {
            key: config[f"num_{key.removeprefix('num_')}"] for key in ("num_experts_per_tok",)
        }
        params["moe"]["num_experts"] = config["num_local_experts"]
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        params["yarn"] = {
            "factor": rope["factor"], "original_max_position_embeddings": length, "beta": rope["beta_fast"],
            "alpha": rope["beta_slow"], "apply_scale": False,
        }  # fmt: skip
        params["llama_4_scaling"] = {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": length,
        }
    (to / "params.json").write_text(json.dumps(params))
    return to


@pytest.mark.parametrize("case", TESTED, ids=[case.name for case in TESTED])
def test_the_bits_of_the_hugging_face_files(case: Case, tmp_path: Path) -> None:
    write(case, tmp_path / "hf")
    want = Runner(build(tmp_path / "hf")).prefill(0, TEXT)
    folder = mistral_copy(tmp_path / "hf", tmp_path / "own")
    assert torch.equal(Runner(build(folder)).prefill(0, TEXT), want)
    (folder / "config.json").write_text(
        "{}"
    )  # with both, Hugging Face's is read unless the other is asked for
    with pytest.raises(QuireError):
        build(folder)
    for asked in (
        {"load_format": "mistral"},
        {"config_format": "mistral", "tokenizer_mode": "mistral"},
    ):
        assert torch.equal(Runner(build(folder, **asked)).prefill(0, TEXT), want)


def test_fp8(tmp_path: Path) -> None:
    """One scale for each matrix; the scale of activations is not used."""
    write(TESTED[0], tmp_path / "hf")
    folder = mistral_copy(tmp_path / "hf", tmp_path / "own")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "consolidated.safetensors").items():
        if ".attention.w" not in name and ".feed_forward." not in name:
            found[name] = tensor
            continue
        scale = tensor.abs().max() / 448
        found[name] = (tensor / scale).to(torch.float8_e4m3fn)
        found[name.replace("weight", "qscale_weight")] = scale
        found[name.replace("weight", "qscale_act")] = torch.tensor(0.1)
    save_file(found, folder / "consolidated.safetensors")
    params = json.loads((folder / "params.json").read_text())
    says = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    (folder / "params.json").write_text(json.dumps({**params, "quantization": says}))
    got, want = (Runner(build(path)).prefill(0, TEXT) for path in (folder, tmp_path / "hf"))
    assert (got - want).norm() / want.norm() < 0.1
    (folder / "params.json").write_text(
        json.dumps({**params, "quantization": {"qformat_weight": "int3"}})
    )
    with pytest.raises(Unsupported, match=r"params.json .*int3"):
        build(folder)


def test_without_weights(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="consolidated"):
        checkpoint_locator.locate(ModelConfig(model=str(tmp_path)), LoadConfig())


# ------------------------------------------------------------------------------------ tekken.json

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = "the then other they hello he world or ld wor \u00e9t\u00e9".split()


def tekken(version: str = "v7") -> dict[str, Any]:
    pieces = {f" {w}"[:n].encode() for w in WORDS for n in range(2, 8)} | {
        w[:n].encode() for w in WORDS for n in range(2, 7)
    }
    more = sorted(piece for piece in pieces if len(piece) > 1)
    random.Random(1).shuffle(more)
    tokens = [bytes([byte]) for byte in range(256)] + sorted(more, key=len)
    special = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    )]  # fmt: skip
    return {
        "config": {"pattern": PATTERN, "num_vocab_tokens": len(tokens) + 50, "default_vocab_size": 10 + len(tokens),
                   "default_num_special_tokens": 10, "version": version},
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)],
        **({"special_tokens": special} if version != "v3" else {}),
    }  # fmt: skip


@pytest.mark.parametrize("version", ["v3", "v7", "v11"])
def test_tokens_merge_by_rank(version: str, tmp_path: Path) -> None:
    """Against a plain loop: merge the leftmost neighbours whose token has the lowest rank."""
    regex: Any = pytest.importorskip("regex")
    made = tekken(version)
    (tmp_path / "tekken.json").write_text(json.dumps(made))
    for name, text in TekkenTokenizer(tmp_path / "tekken.json").files().items():
        (tmp_path / name).write_text(json.dumps(text))
    ours = load_tokenizer(str(tmp_path), mode="mistral")
    ranks = {base64.b64decode(each["token_bytes"]): each["rank"] for each in made["vocab"]}

    def merged(word: bytes) -> list[int]:
        parts = [bytes([byte]) for byte in word]
        while True:
            pairs = [
                (ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks
            ]
            if not pairs:
                return [10 + ranks[part] for part in parts]
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    for text in ("the other world", "hello\n they or\u4f60 \u00e9t\u00e9s 12", "wororld theyhello"):
        words = [word.encode() for word in regex.findall(PATTERN, text)]
        want = [10 + ranks[word] if word in ranks else -1 for word in words]
        ids = [
            i
            for word, whole in zip(words, want, strict=True)
            for i in ([whole] if whole >= 0 else merged(word))
        ]
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == text
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "he"}]
    shown = ours.apply_chat_template(talk, tokenize=False)
    old = "<s>[INST]be\n\nhe[/INST]"
    assert shown == (
        old if version == "v3" else "<s>[SYSTEM_PROMPT]be[/SYSTEM_PROMPT][INST]he[/INST]"
    )
    assert ours.apply_chat_template(talk)[:2] == [1, 3] if version == "v3" else [1, 5]
    parts = [{"type": "audio"}, {"type": "text", "text": "he"}, {"type": "image"}]
    shown = ours.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert shown == "<s>[INST][BEGIN_AUDIO][AUDIO]he[IMG][/INST]"


def test_a_checkpoint_with_config_json_and_only_tekken_json(tmp_path: Path) -> None:
    """As Voxtral is published."""
    (tmp_path / "config.json").write_text("{}")
    assert with_tokenizer_json(str(tmp_path)) == str(tmp_path)
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    made = with_tokenizer_json(str(tmp_path))
    assert load_tokenizer(made).encode("the other")[0] == 1
    assert with_tokenizer_json(made) == made


def test_damaged_files(tmp_path: Path) -> None:
    """Each is refused by name or means something."""
    write(next(case for case in CASES if case.name == "mistral"), tmp_path / "hf")
    folder, draw = mistral_copy(tmp_path / "hf", tmp_path / "own"), random.Random(0)
    small = tekken()
    small["vocab"] = small["vocab"][:300]
    files = {"params.json": (folder / "params.json").read_text(), "tekken.json": json.dumps(small)}
    readers = {
        "params.json": read_params,
        "tekken.json": lambda file: TekkenTokenizer(file).files(),
    }
    refused, silent = dict.fromkeys(files, 0), 0
    for turn in range(600):
        name = list(files)[turn % 2]
        data, file = bytearray(files[name].encode()), tmp_path / name
        if turn % 3 == 0:
            data = data[: draw.randrange(len(data))]
        elif turn % 3 == 1:
            spans = [m.span() for m in re.finditer(rb"(?<=: )[^,}\]]+", bytes(data))]
            start, end = draw.choice(spans[: len(spans) if name == "params.json" else 12])
            data[start:end] = draw.choice(
                [b"null", b"-1", b"0", b"1e400", b'"x"', b"[[]]", b"{}", b"9" * 30]
            )
        else:
            for _ in range(3):
                data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(data)
        try:
            readers[name](file)
        except QuireError as error:
            refused[name] += str(file) in str(error)
            silent += str(file) not in str(error)
    assert min(refused.values()) > 150
    assert not silent
