"""The generic backend from files: a checkpoint on disk to logits, wrappers with towers included."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError, Unsupported
from quire.models.base import CausalLM
from quire.models.load import build_model
from quire.models.transformers.model import TransformersModel
from quire.platforms.cpu import CpuPlatform
from tests.models.archs import ARCHS, PAGED, PER_REQUEST, VOCAB, Arch, make_model, randomise
from tests.models.cases import edit_config, save
from tests.models.harness import Runner
from tests.models.test_generic import CLOSE, in_awkward_pieces, plain_logits, prompts
from tests.models.wrappers import WRAPPERS, Wrapper, make_wrapper

TOWER = re.compile(r"visual|vision|audio|projector|connector")
BY_LABEL = {arch.label: arch for arch in ARCHS}


def build(folder: Path, **asked):
    config = EngineConfig.from_keywords(model=str(folder), **{"dtype": "float32", **asked})
    return build_model(resolve_config(config).spec, CpuPlatform())


def check(theirs, ours) -> None:
    with torch.inference_mode():
        wanted = [plain_logits(theirs, text) for text in prompts()]
        assert wanted[0].std() > 0.05, "logits without a range prove nothing"
        runner = Runner(ours, num_tokens=1024)
        for want, got in zip(wanted, in_awkward_pieces(runner, prompts(), seed=1), strict=True):
            assert (want - got).abs().max() < CLOSE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda w: w.kind)
def test_text_of_a_wrapper_runs_without_its_towers(wrapper: Wrapper, impl: str, tmp_path) -> None:
    theirs = make_wrapper(wrapper)
    save(theirs, tmp_path)
    ours = build(tmp_path, model_impl=impl)
    # In Transformers 5.24, the wrapper of Llama 4 asks for an attribute that its own output class lacks.
    check(theirs.language_model if wrapper.kind == "llama4" else theirs, ours)
    if impl == "auto":
        assert isinstance(ours, CausalLM) == wrapper.runs_as.startswith("native")
    if isinstance(ours, TransformersModel):
        assert ours.mode == (PER_REQUEST if wrapper.runs_as.endswith(PER_REQUEST) else PAGED)
        said = f"text only: model.{wrapper.dropped} not kept"
        assert (said in ours.description) == bool(wrapper.dropped)
    names = (name for name, weight in ours.named_parameters() if weight.numel())
    assert not [name for name in names if TOWER.search(name)]


LABELS = {"mixtral", "deepseek_v3", "gpt_oss", "gpt2", "phi3", "falcon", "qwen3_next", "mamba2"}


@pytest.mark.parametrize("arch", [a for a in ARCHS if a.label in LABELS], ids=lambda a: a.label)
def test_a_loaded_checkpoint_equals_transformers(arch: Arch, tmp_path) -> None:
    """Experts that are stored one by one, names that changed, heads that are tied."""
    theirs = make_model(arch)
    save(theirs, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = build(tmp_path, model_impl="transformers")
    assert isinstance(ours, TransformersModel)
    assert ours.mode == arch.mode
    assert ours.vocab_size == VOCAB
    check(theirs, ours)


def test_old_weight_files_are_read(tmp_path) -> None:
    theirs = make_model(BY_LABEL["gemma2"])
    save(theirs, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    check(theirs, build(tmp_path, model_impl="transformers"))


def test_weights_that_are_missing_are_named(tmp_path) -> None:
    save(make_model(BY_LABEL["gemma2"]), tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    del kept["model.layers.1.mlp.up_proj.weight"]
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
        build(tmp_path, model_impl="transformers")


def test_random_weights_need_no_files_and_follow_the_seed(tmp_path) -> None:
    save(make_model(BY_LABEL["gemma2"]), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    one, same, other = (
        dict(
            build(
                tmp_path, model_impl="transformers", load_format="dummy", seed=seed
            ).named_parameters()
        )
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_an_encoder_decoder_is_refused_before_loading(tmp_path) -> None:
    config = {"architectures": ["BartForConditionalGeneration"], "model_type": "bart"}
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = json.dumps({**config, **sizes, "is_encoder_decoder": True})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Unsupported, match="encoder-decoder"):
        build(tmp_path, load_format="dummy")


def test_an_encoder_is_refused(tmp_path) -> None:
    """Its tokens see those after them, which shows as a difference; nothing needs to know its name."""
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    config = BertConfig(vocab_size=VOCAB, num_hidden_layers=2, **sizes)
    model = BertLMHeadModel(config)
    randomise(model)
    save(model, tmp_path)
    with pytest.raises(Unsupported, match="differ from its plain pass"):
        build(tmp_path)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output
"""


def test_checkpoint_code_needs_trust_remote_code(tmp_path, monkeypatch) -> None:
    theirs = make_model(BY_LABEL["llama"])
    folder = tmp_path / "own_llama"
    save(theirs, folder)
    (folder / "own.py").write_text(OWN_CODE)
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    own = {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": names}
    edit_config(folder, **own)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        build(folder)
    ours = build(folder, trust_remote_code=True)
    assert type(ours.model).__name__ == "OwnForCausalLM"
    with torch.inference_mode():
        want = 3 * plain_logits(theirs, prompts()[0])
        got = Runner(ours).prefill(0, prompts()[0], chunk=7)
    assert (want - got).abs().max() < CLOSE
