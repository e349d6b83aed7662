"""`quire doctor`: what it says of checkpoints made here, on a machine made up here. Nothing is loaded."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from quire.cli import doctor, doctor_checks
from quire.cli.doctor_speed import memory_bandwidth
from quire.engine import resolve
from quire.frontend import tokenizer
from quire.platforms.detect import PlatformFacts, facts

GIB = 1 << 30
FACTS = PlatformFacts(
    device="cpu",
    name="a made-up machine",
    dtypes=("bfloat16", "float32"),
    block_size=64,
    num_batched_tokens=2048,
    max_num_seqs=256,
    depth=1,
    total_bytes=16 * GIB,
    available_bytes=10 * GIB,
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}}'
NUM_WEIGHTS = 1_235_814_400
"""Of a model of one billion: only the header says so, the file is a hole."""


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Make one: `config` changes config.json, `files` are written beside it, None takes one away."""
    for name in [n for n in os.environ if n.startswith(("QUIRE_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "facts", lambda: FACTS)
    monkeypatch.setattr(doctor, "memory_bandwidth", lambda: 20e9)
    monkeypatch.setattr(resolve, "facts", lambda: FACTS)

    def make(config=None, files=None, weights=NUM_WEIGHTS, layers=16):
        write_weights(tmp_path / "model.safetensors", weights, layers)
        texts = {
            "config.json": json.dumps({**CONFIG, **(config or {})}),
            "tokenizer.json": TOKENIZER,
            "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
            **(files or {}),
        }
        for name, text in texts.items():
            if text is None:
                (tmp_path / name).unlink(missing_ok=True)
            else:
                (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path)

    return make


def write_weights(path, count, layers):
    tensors, start = {}, 0
    for layer in range(layers):
        end = start + 2 * (count // layers)
        tensors[f"model.layers.{layer}.w"] = {
            "dtype": "BF16",
            "shape": [count // layers],
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(tensors).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + start)  # a hole: it takes no space


@pytest.fixture
def ask(capsys, checkpoint):
    """(exit status, text) of the command on a checkpoint."""

    def asked(*flags, model=None, **changes):
        status = doctor.main([model or checkpoint(**changes), "--port", "0", *flags])
        return status, capsys.readouterr().out

    return asked


AGREED = """\
PATH on cpu (a made-up machine)

Model
  directory       PATH
  architecture    LlamaForCausalLM
  weights         2.30 GiB, 1 safetensors file
  model code      native (LlamaForCausalLM has a native model)
  dtype           bfloat16
  context         8192 tokens
  step            2048 tokens, 256 requests
  prefix caching  on

Memory
  memory             10.00 GiB available of 16.00 GiB
  used at most       9.00 GiB (90%)
  weights            2.30 GiB
  activations        410.50 MiB for steps of 2048 tokens
  KV cache           6.30 GiB = 3223 blocks of 64, in bfloat16
  tokens that fit    206,272
  requests that fit  25 of max_model_len=8192 (max_num_seqs=256)

What fits
  256 tokens   256 requests at once (max_num_seqs)
  1024 tokens  201 requests at once
  4096 tokens  50 requests at once
  8192 tokens  25 requests at once

Speed
  memory bandwidth  18.63 GiB per second, measured now
  one request       about 6.9 tokens per second; several at once get more in all

Notes
  - 25 of max_num_seqs=256 requests fit at full length: with long contexts some are preempted and recomputed

This configuration would start.

  quire serve PATH --port 0 --max-model-len 8K
"""


def test_the_report_is_as_agreed(ask, tmp_path):
    status, text = ask("--max-model-len", "8K")
    assert text.replace(str(tmp_path), "PATH") == AGREED
    assert status == 0


def test_the_bandwidth_is_measured_in_a_moment():
    began = time.monotonic()
    assert 1e8 < memory_bandwidth() < 1e13
    assert time.monotonic() - began < 30


def test_the_speed_of_experts_and_of_small_models_is_not_guessed(ask):
    assert "Speed" not in ask("--max-model-len", "8K", config={"num_local_experts": 8})[1]
    assert "Speed" not in ask("--max-model-len", "8K", weights=1 << 20)[1]


def test_a_key_is_not_repeated(ask):
    text = ask("--max-model-len", "8K", "--api-key", "s3cret")[1]
    assert "s3cret" not in text
    assert "quire serve" not in text


def test_the_sums_are_right(ask):
    """KV of a token: keys and values of 8 heads of 64 in 16 layers, in two bytes each."""
    token = 2 * 8 * 64 * 16 * 2
    _, text = ask("--max-model-len", "8K", "--kv-cache-memory-bytes", str(token * 64 * 1001))
    assert f"{token * 64 * 1001 / GIB:.2f} GiB = 1000 blocks of 64, in " in text
    assert "8192 tokens  7 requests at once" in text  # 1000 // 128


def test_fp8_weights_are_counted_with_their_scales(ask):
    token = 2 * 8 * (64 + 4) * 16
    room = ("--max-model-len", "8K", "--kv-cache-memory-bytes", str(token * 64 * 1001))
    _, text = ask(*room, "--kv-cache-dtype", "int8_per_token_head")
    assert f"{token * 64 * 1001 / GIB:.2f} GiB = 1000 blocks of 64, in int8" in text
    _, text = ask(*room, "--kv-cache-dtype", "fp8")
    assert "1000 blocks of 64, in fp8_e4m3" in text


# What would go wrong


def test_a_context_that_does_not_fit(ask):
    status, text = ask("--gpu-memory-utilization", "0.5")
    assert status == 1
    assert "Not enough memory: one request of max_model_len=131072 needs 4.00 GiB" in text
    best = int(text.partition("Set max_model_len=")[2].split()[0])
    assert f"the tables above are for --max-model-len {best}" in text
    assert f"{best} tokens" in text
    status, text = ask("--gpu-memory-utilization", "0.5", "--max-model-len", str(best))
    assert status == 0
    assert "only 1 request of max_model_len" in text
    assert ask("--gpu-memory-utilization", "0.5", "--max-model-len", str(best + 64))[0] == 1
    assert ask("--gpu-memory-utilization", "0.5", "--max-model-len", "auto")[0] == 0


def test_a_model_that_does_not_fit(ask):
    status, text = ask("--gpu-memory-utilization", "0.1")
    assert status == 1
    assert (
        "The weights alone do not fit: raise gpu_memory_utilization, or use a smaller model" in text
    )
    assert "What fits" not in text
    assert text.count("Not enough memory") == 1


ERRORS = [
    ({"files": {"model.safetensors": "x"}}, (), "is not a complete safetensors file"),
    ({"files": {"model.safetensors": None}}, (), "has no weights"),
    ({"files": {"config.json": None}}, (), "has no config.json, so it is not a checkpoint"),
    ({"files": {"config.json": "{"}}, (), "config.json cannot be read"),
    ({"files": {"tokenizer.json": None, "tokenizer_config.json": None}}, (), "has no tokenizer.json, tokenizer.model or vocab.json"),
    ({"files": {"tokenizer.json": "{}"}}, (), "tokenizer.json cannot be read"),
    ({}, ("--tokenizer", "nope/nope"), "tokenizer 'nope/nope' was not found"),
    ({}, ("--attention-backend", "FLASHINFER"), "does not run on cpu; choose from CPU_ATTN, TORCH_SDPA"),
    ({"layers": 15}, (), "num_hidden_layers=16, but the files have weights of 15 layers"),
    ({"config": {"quantization_config": {"quant_method": "quark"}}}, (), "a checkpoint quantized with quark"),
    ({"config": {"architectures": ["NewForCausalLM"], "model_type": "brand_new"}}, (), "supports NewForCausalLM (model_type='brand_new'); upgrade"),
    ({"config": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}}, ("--model-impl", "quire"), "model_impl=quire: GPT2LMHeadModel has no native"),
    ({}, ("--max-model-len", "1M"), "--max-model-len 131072 or less"),
    ({}, ("-tp", "2", "-n", "3"), "nnodes=3 with data_parallel_size=1 and 2 ranks in each engine"),
    ({}, ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "512"), "enable_chunked_prefill is off"),
    ({}, ("--chat-template", "/nowhere.jinja"), "chat_template='/nowhere.jinja' is neither a file"),
    ({}, ("--ssl-keyfile", "/nowhere.pem"), "--ssl-keyfile /nowhere.pem: the file does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "flags", "says"), ERRORS, ids=[row[2][:40] for row in ERRORS])
def test_an_error_before_the_start(ask, changes, flags, says):
    status, text = ask(*flags, **changes)
    errors = text.partition("\nErrors\n")[2].partition("\n\n")[0]
    assert says in errors, text
    assert text.endswith("This configuration would not start.\n")
    assert status == 1


WARNINGS = [
    ({"files": {"tokenizer_config.json": "{}"}}, (), "Warnings", "no chat template, so /v1/chat/completions"),
    ({"config": {"eos_token_id": None}}, (), "Warnings", "has an eos_token_id"),
    ({}, ("--dtype", "float16"), "Warnings", "no instructions for float16, so it is slow; --dtype bfloat16"),
    ({}, ("--lora-extra-vocab-size", "4"), "Warnings", "--lora-extra-vocab-size has no effect"),
    ({"config": {"architectures": ["XForCausalLM"], "auto_map": {"AutoModel": "x"}}}, (), "Warnings", "--trust-remote-code"),
    ({}, ("--dtype", "float32", "--max-model-len", "9"), "Notes", "a copy of 4.60 GiB"),
    ({"config": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}}, (), "Notes", "runs through Transformers"),
    ({}, ("--load-format", "dummy"), "Notes", "the weights are random"),
    ({}, ("--skip-tokenizer-init",), "Notes", "prompts and outputs are token ids"),
    ({"files": {"generation_config.json": '{"temperature": 0.6}'}}, (), "Notes", "temperature=0.6; --generation-config vllm"),
    ({"files": {"generation_config.json": '{"max_new_tokens": 99}'}}, (), "Warnings", "limits every output to 99 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "flags", "title", "says"), WARNINGS, ids=[row[3][:40] for row in WARNINGS]
)
def test_doctor_warns_about_models_that_start_but_disappoint(ask, changes, flags, title, says):
    status, text = ask("--max-model-len", "8K", *flags, **changes)
    assert says in text.partition(f"\n{title}\n")[2].partition("\n\n")[0], text
    assert status == 0
    _, well = ask(
        "--max-model-len", "8K", files={"tokenizer.model": None, "generation_config.json": None}
    )
    assert says not in well


def test_a_tokenizer_for_transformers_is_slow(ask, monkeypatch):
    class Slow(list):
        special_tokens_map, chat_template, added_tokens_decoder, all_special_ids = (
            {},
            "{{ messages }}",
            {},
            (),
        )

    monkeypatch.setattr(tokenizer, "load_with_transformers", lambda *_, **__: Slow("abc"))
    status, text = ask("--max-model-len", "8K", files={"tokenizer.json": None, "vocab.json": "x"})
    assert status == 0
    assert "the checkpoint has vocab.json but no tokenizer.json: Transformers loads it" in text


def test_doctor_reports_a_port_in_use(ask):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, text = ask("--max-model-len", "8K", "--port", port)
    assert f"port {port} of 127.0.0.1 cannot be bound" in text
    assert status == 0  # it may be free by then


BLOOM = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
FALCON = {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}


@pytest.mark.parametrize("config", [BLOOM, FALCON])
def test_doctor_lists_features_missing_with_a_per_request_cache(ask, config):
    flags = ("--max-model-len", "8K")
    status, text = ask(*flags, config=config)
    assert status == 0
    assert "one cache per request" in text
    assert "prefix caching  off" in text
    status, text = ask(*flags, "--kv-cache-dtype", "int8", config=config)
    assert status == 1
    assert (
        f"kv_cache_dtype=int8 for {config['architectures'][0]}, which keeps its cache itself"
        in text
    )
    assert "leave kv_cache_dtype=auto" in text


def test_doctor_reports_that_transformers_models_are_not_quantized(ask):
    status, text = ask("--max-model-len", "8K", "--quantization", "int8", config=FALCON)
    assert status == 1
    assert "quantized weights of FalconForCausalLM, which runs through Transformers" in text


def test_doctor_reports_an_unsupported_model(ask):
    config = {"architectures": ["BltForCausalLM"], "model_type": "blt"}
    status, text = ask("--max-model-len", "8K", config=config)
    assert status == 1
    assert "it reads bytes through its own encoder" in text


# A hub id whose weights are not here


@pytest.fixture
def hub(monkeypatch, checkpoint):
    """`some/model`: the small files come, the weights' headers are asked for, no weights are fetched."""
    hub = pytest.importorskip("huggingface_hub")
    folder = checkpoint(files={"model.safetensors": None})
    asked = []

    def fetch(name, *, ignore_patterns, **about):
        asked.append((name, ignore_patterns))
        return folder

    class Api:
        def __init__(self, token=None): ...

        def model_info(self, name, **about):
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename="model.safetensors")])

        def get_safetensors_metadata(self, name, **about):
            tensor = SimpleNamespace(dtype="BF16", shape=[1000, 1000, 1000])
            return SimpleNamespace(files_metadata={"a": SimpleNamespace(tensors={"w": tensor})})

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    monkeypatch.setattr(hub, "HfApi", Api)
    return asked


def test_doctor_downloads_no_weights(ask, hub, monkeypatch):
    usage = SimpleNamespace(free=5 * GIB)
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda path: usage)
    status, text = ask("--max-model-len", "8K", model="some/model")
    assert status == 0
    assert "weights         1.86 GiB, not downloaded yet" in text
    assert "starting downloads the weights: 1.86 GiB" in text
    assert hub[0][0] == "some/model"
    assert {"*.safetensors", "*.bin", "*.pt", "*.pth"} <= set(hub[0][1])
    usage.free = GIB
    status, text = ask("--max-model-len", "8K", model="some/model")
    assert status == 1
    assert "has 1.00 GiB free; free some space, or choose another disk with --download-dir" in text


# The command


def test_doctor_accepts_the_flags_of_serve(capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["m", "--max-num-seq", "3"])
    assert ended.value.code == 2
    assert "quire doctor: error: unknown flag --max-num-seq" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor.main(["--help=scheduler"])


def test_loggers_are_as_before(ask):
    ours = logging.getLogger("quire")
    before = (list(ours.handlers), ours.propagate)
    ask("--swap-space", "9")
    assert (ours.handlers, ours.propagate) == before


def test_doctor_does_not_import_torch(checkpoint):
    code = (
        "import sys; from quire.cli.main import main; status = main(sys.argv[1:])\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules], status)"
    )
    words = [
        "doctor",
        checkpoint(),
        "--max-model-len",
        "64",
        "--kv-cache-memory-bytes",
        "1G",
        "--port",
        "0",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.splitlines()[-1] == "[] 0", done.stdout + done.stderr


def test_a_device_that_is_not_there_is_an_error_of_the_report(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "facts", facts)
    monkeypatch.setenv("QUIRE_DEVICE", "tpu9")
    assert doctor.main([str(checkpoint())]) == 1
    assert "QUIRE_DEVICE=tpu9: choose from cpu, cuda" in capsys.readouterr().out


def test_doctor_names_the_flag_that_limits_the_kv_cache(ask):
    small = ["--max-model-len", "2048"]
    assert "raise --kv-cache-memory-bytes" in ask(*small, "--kv-cache-memory-bytes", "100M")[1]
    assert "--gpu-memory-utilization" not in ask(*small, "--kv-cache-memory-bytes", "100M")[1]
