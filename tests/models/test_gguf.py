"""GGUF files against the checkpoints that they were made of: config, tokenizer, tensors, tokens; and damaged ones."""

from __future__ import annotations

import json
import random
import shutil
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from quire.attention.cpu import CpuAttention
from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.engine.resolve import resolve_config
from quire.errors import ModelNotFound, QuireError, Unsupported
from quire.frontend.tokenizer import load as load_tokenizer
from quire.layers.weights import weights_of
from quire.models import checkpoint_locator
from quire.models.gguf import hub
from quire.models.gguf.families import config_of, tensor_places
from quire.models.gguf.header import GgufHeader, read_header
from quire.models.gguf.tokenizer import GgufTokenizer
from quire.models.load import build_model
from quire.ops.cpu.bindings import best
from quire.platforms.cpu import CpuPlatform
from quire.quantization.apply import prepared_weights, weight_bytes
from quire.quantization.gguf_blocks import BlocksWeight
from tests.models.cases import BASE, BOTH_ROPES, CASES, GEMMA2, MOE, OSS, OSS_ROPE, Case, write
from tests.models.gguf_files import TINY, GgufCopy, mixed
from tests.models.harness import Runner
from tests.tiny_llama import make_checkpoint

PROMPT = [5, 7, 9, 11, 2, 3, 90, 100, 4]


def build(path: Path, **options: Any) -> Any:
    config = EngineConfig.from_keywords(
        model=str(path), **{"dtype": "float32", "skip_tokenizer_init": True, **options}
    )
    return build_model(resolve_config(config).spec, CpuPlatform())


GGUF_CASES = [
    "llama", "llama tied", "llama of few keys", "llama one kv head", "linear", "yarn", "mistral",
    "mistral window", "qwen2", "qwen2 tied", "qwen3", "qwen3 tied",
    "phi3", "phi3 longrope", "granite", "olmo2", "glm4", "mixtral", "qwen2 moe", "qwen3 moe", "olmoe", "glm4 moe",
    "glm4 moe in groups", "ernie4_5", "granite moe", "minimax m2", "minimax m2 partial rope", "deepseek v2", "deepseek v2 lite",
    "deepseek v3", "gemma4", "gemma4 values from keys", "gemma4 moe",
    "granite moe shared", "ernie4_5 moe",
]  # fmt: skip
IMPLIED = [  # values that the files of these families do not contain
    Case("gemma2", "gemma2", {**GEMMA2, "query_pre_attn_scalar": BASE["head_dim"]}),
    Case(
        "gemma3",
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "sliding_window": 5,
            "query_pre_attn_scalar": BASE["head_dim"],
            "rope_parameters": {
                **BOTH_ROPES,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    Case("smollm3", "smollm3", {"num_hidden_layers": 4}),
    Case(
        "llama4",
        "llama4_text",
        {
            **MOE,
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    Case("seed_oss", "seed_oss", {"attention_bias": True}),
    Case("gemma", "gemma"),
    Case(
        "cohere2",
        "cohere2",
        {"num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 1.5, "head_dim": None},
    ),
    Case("exaone4", "exaone4", {"num_hidden_layers": 4, "sliding_window": 5}),
    Case("gpt-oss", "gpt_oss", {**MOE, **OSS, "num_local_experts": 6, "rope_parameters": OSS_ROPE}),
]
GGUF_MODELS = [
    *(c for c in CASES if {c.name, c.name.removeprefix("llama ")} & {*GGUF_CASES}),
    *IMPLIED,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name.replace(" ", "-")) for c in GGUF_MODELS]
)
def test_a_float_file_gives_the_bits_of_its_checkpoint(case: Case, tmp_path: Path) -> None:
    write(case, tmp_path / "st")
    short = {"max_model_len": 64} if "longrope" in case.name else {}
    wanted = Runner(build(tmp_path / "st", **short)).prefill(0, PROMPT)
    file = GgufCopy(tmp_path / "st").write(tmp_path / "model.gguf")
    assert torch.equal(Runner(build(file, **short)).prefill(0, PROMPT), wanted)


def test_rope_factors_in_a_tensor(tmp_path: Path) -> None:
    """(llama.cpp computes the factors of Llama 3 when it converts; config.json's recipe is not in the file.)"""
    write(next(c for c in CASES if c.name == "llama llama3"), tmp_path / "st")
    wanted = Runner(build(tmp_path / "st")).prefill(0, PROMPT * 9)
    file = GgufCopy(tmp_path / "st").write(tmp_path / "model.gguf")
    assert (Runner(build(file)).prefill(0, PROMPT * 9) - wanted).abs().max() < 1e-4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a GGUF file."""
    return GgufCopy(TINY, lambda name: Kind.BF16).write(
        tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    )


def test_the_whole_directory_comes_from_the_file(tiny: Path) -> None:
    options = ModelConfig(model=str(tiny))
    folder = Path(checkpoint_locator.locate(options, LoadConfig()))
    config, wanted = (json.loads((f / "config.json").read_text()) for f in (folder, TINY))
    for key in (
        "architectures",
        "model_type",
        "hidden_size",
        "head_dim",
        "vocab_size",
        "dtype",
        "tie_word_embeddings",
    ):
        assert config[key] == wanted[key], key
    ours, theirs = load_tokenizer(str(folder)), load_tokenizer(str(TINY))
    text = "<|im_start|>user\nWhat is twelve + 3?<|im_end|>\n<think> it's \u00e9\u4f60 </think>\n"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert (ours.eos_token_id, ours.special_ids) == (theirs.eos_token_id, theirs.special_ids)
    talk = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(talk)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert sorted(ends) == [0, 2]
    assert checkpoint_locator.locate(options, LoadConfig()) == str(folder)


def test_a_directory_and_parts(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny, tmp_path / "a.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    folder = checkpoint_locator.locate(ModelConfig(model=str(tmp_path)), LoadConfig())
    assert (Path(folder) / "a.gguf").is_symlink()
    shutil.copy(tiny, tmp_path / "b.gguf")
    with pytest.raises(ModelNotFound, match=r"2 GGUF models \(a.gguf, b.gguf\)"):
        checkpoint_locator.locate(ModelConfig(model=str(tmp_path)), LoadConfig())


def test_split_files(tiny: Path, tmp_path: Path) -> None:
    """Each part has a header of its own; the first has the metadata."""
    from gguf import GGUFWriter

    copy = GgufCopy(TINY, lambda name: Kind.BF16)
    writer = GGUFWriter(tmp_path / "m.gguf", copy.arch, split_max_tensors=40)
    copy.fill(writer)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 2
    whole, split = build(tiny), build(parts[1])
    assert torch.equal(Runner(whole).prefill(0, PROMPT), Runner(split).prefill(0, PROMPT))
    parts[0].unlink()
    with pytest.raises(ModelNotFound, match=r"1 are missing: m-00001-of-00002.gguf"):
        checkpoint_locator.locate(ModelConfig(model=str(parts[1])), LoadConfig())


# ------------------------------------------------------------------------------------ SentencePiece

WORDS = "the then other they hello he world or ld wor".split()


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    """Against the longest way round: merge the pair whose token has the best score, until there is none."""
    space = "▁"
    pieces = sorted(
        {space + w[:n] for w in WORDS for n in range(len(w) + 1)}
        | {w[:n] for w in WORDS for n in range(2, len(w) + 1)}
    )
    letters = sorted({c for w in WORDS for c in w} | {space})
    pieces = [p for p in pieces if len(p) > 1]
    random.Random(2).shuffle(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters, *pieces]
    first = len(tokens) - len(pieces)
    scores = [0.0] * first + [-float(i) for i in range(len(pieces))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(pieces))]
    meta = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # fmt: skip
    header = GgufHeader((Path("x.gguf"),), {f"tokenizer.ggml.{k}": v for k, v in meta.items()}, ())
    made = GgufTokenizer(header)
    for name, text in (
        ("tokenizer.json", made.tokenizer_json()),
        ("tokenizer_config.json", made.tokenizer_config()),
    ):
        (tmp_path / name).write_text(json.dumps(text))
    ours = load_tokenizer(str(tmp_path))

    def merged(text: str) -> list[int]:
        parts = list(space + text.replace(" ", space))
        while True:
            pairs = [
                (-scores[tokens.index(a + b)], i)
                for i, (a, b) in enumerate(pairwise(parts))
                if a + b in tokens
            ]
            if not pairs:
                return [tokens.index(p) for p in parts]
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    for text in ("the other world", "hello they then or", " two  spaces"):
        known = "".join(c for c in text if c in {*letters, " "})
        assert ours.encode(known) == [1, *merged(known)]
        assert ours.decode(ours.encode(known), skip_special_tokens=True) == known
    assert ours.encode("é", add_special_tokens=False)[-2:] == [3 + 0xC3, 3 + 0xA9]


def test_gemma_4_lists_its_merges(tmp_path: Path) -> None:
    """Not by score: the scores of its file are all alike."""
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *"▁hel",
        "he",
        "el",
        "▁he",
        "hel",
    ]
    meta = {"model": "gemma4", "tokens": tokens, "scores": [0.0] * len(tokens), "merges": ["e l", "h e", "▁ he", "h el"],
            "token_type": [3] * 3 + [6] * 256 + [1] * 8, "bos_token_id": 2, "eos_token_id": 1, "add_bos_token": True}  # fmt: skip
    metadata = {
        "general.architecture": "gemma4",
        **{f"tokenizer.ggml.{k}": v for k, v in meta.items()},
    }
    made = GgufTokenizer(GgufHeader((Path("x.gguf"),), metadata, ()))
    (tmp_path / "tokenizer.json").write_text(json.dumps(made.tokenizer_json()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(made.tokenizer_config()))
    ours = load_tokenizer(str(tmp_path))
    assert [ours.token(i) for i in ours.encode("hel he\n")] == ["<bos>", "hel", "▁he", "<0x0A>"]
    assert ours.decode(ours.encode("hel he\n", add_special_tokens=False)) == "hel he\n"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "st"
    write(next(c for c in CASES if c.name == "qwen3"), folder)
    copy = GgufCopy(folder)
    copy.arch = "rwkv7"
    with pytest.raises(Unsupported, match=r"architecture 'rwkv7'.*qwen3"):
        checkpoint_locator.locate(
            ModelConfig(model=str(copy.write(tmp_path / "m.gguf"))), LoadConfig()
        )
    for start, said in ((b"GGUF\0\0\0\3", "big-endian"), (b"GGUF\1\0\0\0", "version 1")):
        (tmp_path / "m.gguf").write_bytes(start + bytes(32))
        with pytest.raises(Unsupported, match=said):
            read_header(tmp_path / "m.gguf")


# ------------------------------------------------------------------------------------ the hub


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b-GGUF:Q4_K_M", ("a/b-GGUF", "Q4_K_M")),
        ("hf.co/a/b:q8_0", ("a/b", "q8_0")),
        ("a/b/x-Q4_0.gguf", ("a/b", "x-Q4_0.gguf")),
        ("a/b/Q8/x-00001-of-00002.gguf", ("a/b", "Q8/x-00001-of-00002.gguf")),
        ("a/b", None),
        ("/a/b.gguf", None),
        ("./a/b.gguf", None),
    ],
)
def test_names_of_the_hub(name: str, parts: tuple[str, str] | None) -> None:
    assert hub.gguf_name(name) == parts


def test_the_files_of_a_quantization() -> None:
    files = ["README.md", "m-Q4_K_M.gguf", "m-IQ4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "mmproj-m-Q4_K_M.gguf"]  # fmt: skip
    assert hub.choose(files, "a/b", "") == ["m-Q4_K_M.gguf"]
    assert hub.choose(files, "a/b", "q4_k_m") == ["m-Q4_K_M.gguf"]
    assert hub.choose(files, "a/b", "Q8_0") == files[3:5]
    with pytest.raises(ModelNotFound, match=r"a/b has no GGUF file Q2_K; it has m-IQ4_K_M.gguf"):
        hub.choose(files, "a/b", "Q2_K")


# ------------------------------------------------------------------------------------ damaged files


def test_mutated_headers(tmp_path: Path) -> None:
    """Each is refused by name or means something; none costs memory beyond its own size."""
    make_checkpoint(tmp_path)
    whole = GgufCopy(tmp_path).write(tmp_path / "m.gguf").read_bytes()
    file, draw = tmp_path / "x.gguf", random.Random(0)
    refused = silent = 0
    end = whole.index(b"blk.1.ffn_down.weight")
    small = (at for at in range(end) if struct.unpack_from("<Q", whole, at)[0] in range(1, 64))
    lengths = list(small)
    file.write_bytes(whole)
    read_header(file)
    peak = 0
    for turn in range(1000):
        data = bytearray(whole)
        if turn % 4 == 0:
            data = data[: draw.randrange(len(data))]
        elif turn % 4 == 1:
            at = draw.choice(lengths)
            struct.pack_into("<Q", data, at, draw.choice([0, 1 << 20, 1 << 40, (1 << 64) - 1]))
        else:
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(end)] = draw.randrange(256)
        with file.open("wb") as opened:  # what follows the header is a hole
            opened.write(data[: end + 200])
            opened.truncate(len(data))
        if turn % 16 == 1:
            tracemalloc.start()
        try:
            header = read_header(file)
            config_of(header)
            GgufTokenizer(header).tokenizer_json()
        except QuireError as error:
            refused += str(file) in str(error)
            silent += str(file) not in str(error)
        if tracemalloc.is_tracing():
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert (refused > 500, silent) == (True, 0)
    assert peak < 20 * len(whole)


# ------------------------------------------------------------------------------------ blocks


@pytest.mark.skipif(best() is None, reason="no kernels")
@pytest.mark.parametrize("tied", [True, False])
def test_weights_stay_in_their_blocks(tied: bool, tmp_path: Path) -> None:
    """And give nearly the logits of the same weights as floats, by the fast path too."""
    copy = GgufCopy(TINY, mixed)
    file = copy.write(tmp_path / "m.gguf", head=None if tied else Kind.Q4_K)
    model, floats = build(file, dtype="bfloat16"), build(file)
    prepared = prepared_weights(model)
    assert {type(each) for each in prepared} == {BlocksWeight}
    assert len(prepared) == 5 * 4 + (1 if tied else 2)
    assert weight_bytes(model) < 0.3 * weight_bytes(floats)
    ids = torch.arange(0, 1536, 7)
    assert torch.equal(model.embed(ids), floats.embed(ids).bfloat16())
    got = Runner(model, dtype=torch.bfloat16, backend=CpuAttention()).prefill(0, PROMPT * 5)
    want = Runner(floats).prefill(0, PROMPT * 5)
    assert (got - want).norm() / want.norm() < 0.15  # of unrelated logits 1.4


def test_other_types_become_floats(tmp_path: Path) -> None:
    """The same bits as from a checkpoint with the dequantized weights."""
    copy = GgufCopy(TINY, lambda name: Kind.NVFP4 if "ffn_down" not in name else Kind.BF16)
    file = copy.write(tmp_path / "m.gguf")
    names = {each.tensor.name: each.name for each in tensor_places(read_header(file), copy.config)}
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, tmp_path)
    folder = tmp_path / "st"
    folder.mkdir()
    shutil.copy(TINY / "config.json", folder)
    save_file(
        {names[name]: values for name, values in copy.floats.items()}, folder / "model.safetensors"
    )
    for dtype in ("float32", "bfloat16"):
        got = [
            Runner(build(path, dtype=dtype), dtype=getattr(torch, dtype)) for path in (file, folder)
        ]
        one, two = (runner.prefill(0, PROMPT) for runner in got)
        assert torch.equal(one, two)


@pytest.mark.skipif(best() is None, reason="no kernels")
def test_experts_stay_in_their_blocks(tmp_path: Path) -> None:
    """A file stacks the experts of a layer in one tensor; each becomes a weight of its own."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32}
    write(Case("mixture", "qwen3_moe", {**MOE, **sizes}), tmp_path / "st")
    kinds = {"ffn_gate_inp": Kind.F32, "ffn_down_exps": Kind.Q8_0}
    copy = GgufCopy(tmp_path / "st", lambda name: kinds.get(name.split(".")[-2], Kind.Q4_0))
    file = copy.write(tmp_path / "m.gguf")
    model, floats = build(file, dtype="bfloat16"), build(file)
    kept = [type(ref.prepared) for ref in weights_of(model) if not ref.exact]
    assert set(kept) == {BlocksWeight}
    assert len(kept) > 2 * 2 * 6
    got = Runner(model, dtype=torch.bfloat16).prefill(0, PROMPT * 3)
    want = Runner(floats).prefill(0, PROMPT * 3)
    assert (got - want).norm() / want.norm() < 0.1
