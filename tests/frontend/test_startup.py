"""The checks of every start: what cannot be served is refused before weights are read, with one sentence."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import save_byte_level

from quire.attention import names
from quire.attention.base import load_backend
from quire.config.engine import EngineConfig, Resolved
from quire.engine import build
from quire.engine.resolve import resolve_without_weights
from quire.errors import ConfigError, ModelNotFound, QuireError, Unsupported
from quire.frontend.startup import CHECKS, check_startup, load_tokenizer, start_engine
from quire.models import supported
from quire.platforms.detect import ATTENTION

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "vocab_size": 300,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
BLOOM = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}


@pytest.fixture
def resolved(tmp_path: Path) -> Any:
    """Resolve a checkpoint made here, without weights: nothing may read them."""
    save_byte_level(tmp_path)

    def make(config: dict[str, Any] | None = None, **options: Any) -> Resolved:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
        return resolve_without_weights(EngineConfig.from_keywords(model=str(tmp_path), **options))[
            0
        ]

    return make


def arch(name: str, kind: str = "llama", **more: Any) -> dict[str, Any]:
    return {"architectures": [name], "model_type": kind, **more}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[QuireError], str]] = [
    (arch("NewForCausalLM", "brand_new"), {}, ConfigError,
     r"^neither Quire nor the installed Transformers [\d.]+ supports NewForCausalLM \(model_type='brand_new'\); upgrade"),
    (arch("NewForCausalLM", "brand_new", auto_map={"AutoModel": "x.Y"}), {}, ConfigError, "review it, then pass --trust-remote-code"),
    (arch("T5ForConditionalGeneration", "t5"), {}, Unsupported, "it is an encoder-decoder"),
    (arch("T5ForConditionalGeneration", "t5", is_encoder_decoder=True), {}, Unsupported, "it is an encoder-decoder"),
    (arch("BartForConditionalGeneration", "bart"), {}, Unsupported, "it is an encoder-decoder"),
    (arch("FunnelModel", "funnel"), {}, Unsupported, "FunnelModel as a pooling model"),
    (arch("BltForCausalLM", "blt"), {}, Unsupported, "reads bytes through its own encoder"),
    (GPT2, {"quantization": "int8"}, Unsupported, "quantized weights of GPT2LMHeadModel, which runs through Transformers"),
    ({**GPT2, **AWQ}, {}, Unsupported, "quantized weights of GPT2LMHeadModel"),
    (BLOOM, {"kv_cache_dtype": "int8"}, Unsupported, "kv_cache_dtype=int8 for BloomForCausalLM"),
    ({}, {"attention_backend": "FLASHINFER"}, ConfigError,
     "attention_backend=FLASHINFER: this backend does not run on cpu; choose from CPU_ATTN, TORCH_SDPA"),
    ({}, {"attention_backend": "fast"}, ConfigError, "attention_backend=FAST: unknown; choose from CPU_ATTN, TORCH_SDPA"),
    ({}, {"chat_template": "/nowhere.jinja"}, ConfigError, "'/nowhere.jinja' is neither a file nor a Jinja template"),
    ({}, {"chat_template": "{% if %}"}, ConfigError, "the chat template does not parse"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "options", "error", "says"), REFUSED, ids=[row[3][:30] for row in REFUSED]
)
def test_unsupported_checkpoints_are_refused(resolved, config, options, error, says) -> None:
    with pytest.raises(error, match=says) as caught:
        check_startup(resolved(config, **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({}, {"attention_backend": "cpu_attn", "chat_template": "{{ messages }}"}),
        (GPT2, {}),
        (BLOOM, {}),
        (AWQ, {}),
        (arch("BartForCausalLM", "bart"), {}),
        (arch("GPT2LMHeadModel", "gpt2"), {}),
        (arch("BertModel", "bert"), {}),
        (arch("XLMRobertaForSequenceClassification", "xlm-roberta"), {}),
        (arch("Qwen2ForRewardModel", "qwen2"), {}),
        (arch("ChatGLMModel", "chatglm", auto_map={"AutoModelForCausalLM": "x.Y"}), {"trust_remote_code": True}),
    ],
)  # fmt: skip
def test_supported_checkpoints_are_accepted(resolved, config, options) -> None:
    check_startup(resolved(config, **options))


def test_the_checks_cost_little(resolved) -> None:
    """Their share of a start; without a clock of the machine: CPU time of this thread."""
    one = resolved()
    check_startup(one)
    began = time.thread_time()
    for _ in range(10):
        check_startup(one)
    assert (time.thread_time() - began) / 10 < 0.005


def test_a_backend_of_a_plug_in_may_run_anywhere(resolved, monkeypatch) -> None:
    monkeypatch.setitem(names.BACKENDS, "MINE", "mine:Mine")
    check_startup(resolved(attention_backend="mine"))
    with pytest.raises(ConfigError, match="choose from CPU_ATTN, TORCH_SDPA, MINE"):
        check_startup(resolved(attention_backend="other"))


def test_the_devices_of_the_backends() -> None:
    for device, backends in ATTENTION.items():
        for name in {"CPU_ATTN", "TORCH_SDPA", "TRITON_ATTN"} & set(backends):
            devices = load_backend(name).can.devices
            assert devices is None or device in devices
    assert {name for each in ATTENTION.values() for name in each} == set(names.BACKENDS)


def test_model_types_known_to_transformers() -> None:
    assert supported.known_to_transformers("gpt2")
    assert supported.known_to_transformers("gemma3_text")  # in a folder of another name
    assert supported.known_to_transformers("xlm-roberta")
    assert not supported.known_to_transformers("brand_new")
    assert not supported.known_to_transformers("")


# ------------------------------------------------------------------------------------ tokenizers


@pytest.mark.parametrize("left", [(), ("tokenizer_config.json",)])
def test_a_checkpoint_without_a_tokenizer_is_refused(resolved, tmp_path: Path, left) -> None:
    """(Transformers makes an empty one; each request was then "the prompt is empty".)"""
    one = resolved()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if file not in left:
            (tmp_path / file).unlink()
    with pytest.raises(
        ModelNotFound, match=r"no tokenizer in .*--tokenizer.*--skip-tokenizer-init"
    ):
        check_startup(one)
    check_startup(resolved(skip_tokenizer_init=True))
    assert load_tokenizer(resolved(skip_tokenizer_init=True)) is None


def test_an_empty_vocabulary_is_refused(resolved, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    text = json.loads(file.read_text())
    text["model"].update(vocab={}, merges=[])
    text["added_tokens"] = [dict(text["added_tokens"][0], id=0, special=True)]
    file.write_text(json.dumps(text))
    with pytest.raises(ModelNotFound, match="its vocabulary is empty"):
        load_tokenizer(resolved())


def test_a_tokenizer_that_git_lfs_has_not_fetched_is_named(resolved, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"tokenizer.json is a Git LFS pointer.*git lfs pull"):
        load_tokenizer(resolved())


def test_a_broken_template_of_the_checkpoint_is_a_warning(resolved, tmp_path: Path, caplog) -> None:
    """Completions work without it."""
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with caplog.at_level(logging.WARNING, "quire"):
        assert load_tokenizer(resolved()) is not None
    assert "does not parse" in caplog.text
    assert "/v1/chat/completions refuses requests; set one with --chat-template" in caplog.text


# ------------------------------------------------------------------------------------ which process runs them


def test_a_program_runs_them_before_it_loads(resolved, monkeypatch) -> None:
    """(There are no weights: an attempt to read them would be the error.)"""
    one = resolved(attention_backend="NONE")

    def loaded(*args: Any, **options: Any) -> Any:
        raise AssertionError("it loads")

    monkeypatch.setattr(build, "make_client", loaded)
    for process in (False, True):
        with pytest.raises(ConfigError, match="attention_backend=NONE"):
            start_engine(one.config, process=process)


@pytest.mark.parametrize("command", ["serve", "complete", "chat", "doctor"])
def test_each_command_says_the_same(resolved, command: str) -> None:
    one = resolved(arch("T5ForConditionalGeneration", "t5"))
    words = [command, one.path] + (
        ["-q", "a"] if command in ("complete", "chat") else ["--port", "0"]
    )
    code = "import sys; from quire.cli.main import main; status = main(sys.argv[1:]); sys.exit(status if 'torch' not in sys.modules else 9)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr
    assert "it is an encoder-decoder" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_all_checks_are_of_the_same_form() -> None:
    assert all((check.__doc__ or "").startswith(("Raises", "Refuse")) for check in CHECKS)
