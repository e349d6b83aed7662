"""Adapters that are active only beside sound: Granite-Speech 3, whose checkpoint has one, and those that users name for a kind of media.

The peer is Transformers with PEFT, whose adapter is enabled for a prompt with sound and disabled for others, as `generate` of
Transformers' class does with an adapter that it has loaded itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audio_checkpoints import CHECKPOINTS, sound, transformers_model
from safetensors.torch import load_file, save_file
from test_sound_equality import COUNT, GREEDY, given, peer
from transformers import AutoTokenizer

from quire.config.from_keywords import engine_config
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError, ValidationError
from quire.features.lora.gate import LoraGate
from quire.models.audio_tower import why_no_audio
from quire.protocol.request import EngineRequest, MediaItem
from quire.protocol.sampling_params import SamplingParams

pytest.importorskip("peft")
KIND = "granite_speech_3"
TEXT = "this text is the same in all prompts, then: @?"
OTHER = sound(2, 0.4)
SILENT = "<s>" + TEXT.replace("@", "not")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def tokens(llm: Any, *prompts: Any, **more: Any) -> list[list[int]]:
    outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False, **more)
    return [list(out.outputs[0].token_ids) for out in outputs]


@pytest.fixture(scope="module")
def path(checkpoint: Callable[[str], str]) -> str:
    return checkpoint(KIND)


@pytest.fixture(scope="module")
def silent(path: str) -> list[int]:
    """Transformers' tokens of the text alone."""
    model = transformers_model(path, CHECKPOINTS[KIND]["architecture"])
    ids = AutoTokenizer.from_pretrained(path)(SILENT, add_special_tokens=False, return_tensors="pt")["input_ids"]  # fmt: skip
    with torch.inference_mode(), model.disable_adapter():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    found: list[int] = out[0, ids.shape[1] :].tolist()
    return found


@pytest.fixture(scope="module")
def other(path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another adapter, with the names that published checkpoints have."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copy(Path(path) / CONFIG, folder)
    own = load_file(Path(path) / WEIGHTS)
    renamed = {name.replace("model.language_model.", "language_model.model."): -tensor.flip(0) for name, tensor in own.items()}  # fmt: skip
    assert renamed.keys().isdisjoint(own)
    save_file(renamed, folder / WEIGHTS)
    return str(folder)


def test_rows_with_and_without_sound_in_one_batch(engine, path, silent):
    heard = [peer(path, KIND, TEXT, [one])[1] for one in (sound(1), OTHER)]
    prompts = [given(KIND, TEXT, [sound(1)]), SILENT, given(KIND, TEXT, [OTHER]), SILENT]
    assert heard[0] != heard[1]
    with engine(KIND, max_num_batched_tokens=256) as llm:
        assert tokens(llm, *prompts) == [heard[0], silent, heard[1], silent]
        for chunk in (prompts[:2], prompts[2:]):
            assert tokens(llm, *chunk[::-1]) == tokens(llm, *chunk)[::-1]


def test_the_adapter_matters(engine, path, silent):
    """The same sound without the adapter, and the text with it, have other tokens."""
    prompt = given(KIND, TEXT, [sound(1)])
    with engine(KIND, max_num_batched_tokens=256) as llm:
        (heard,) = tokens(llm, prompt)
        (adapted,) = tokens(llm, SILENT, lora_request="audio")
    with engine(KIND, hf_overrides={"has_lora_adapter": False}) as llm:
        assert not llm.front.client.resolved.config.lora.enable_lora
        (plain,) = tokens(llm, prompt)
    assert plain != heard
    assert adapted != silent


def test_prefixes_of_text_and_of_sound_are_apart(engine, silent):
    """All prompts begin with the same tokens, of which keys and values differ by the adapter."""
    prompt = given(KIND, TEXT, [sound(1)])
    with engine(KIND, max_num_batched_tokens=256) as llm:
        (first,) = tokens(llm, prompt)
        (out,) = llm.generate([SILENT], GREEDY, use_tqdm=False)
        assert (out.num_cached_tokens, list(out.outputs[0].token_ids)) == (0, silent)
        (out,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert out.num_cached_tokens >= 32
        assert list(out.outputs[0].token_ids) == first
        (out,) = llm.generate([given(KIND, TEXT, [OTHER])], GREEDY, use_tqdm=False)
        assert out.num_cached_tokens >= 16  # up to the other sound


def test_adapters_that_users_name(engine, path, other, silent):
    """`default_mm_loras` replaces the checkpoint's adapter; a request that names an adapter has that one."""
    prompt = given(KIND, TEXT, [sound(1)])
    options = {"enable_lora": True, "max_loras": 2, "max_num_batched_tokens": 256, "lora_modules": {"own": path}}  # fmt: skip
    with engine(KIND, **options, default_mm_loras={"audio": other}) as llm:
        heard = tokens(llm, prompt, SILENT, prompt, lora_request=[None, None, "own"])
        by_name = tokens(llm, prompt, lora_request="audio")
    assert heard[1] == silent
    assert heard[2] == peer(path, KIND, TEXT, [sound(1)])[1]
    assert heard[0] == by_name[0] != heard[2]
    with engine(KIND, enable_lora=True, lora_modules={"other": other}) as llm:
        lora = llm.front.client.resolved.config.lora
        assert (lora.max_loras, lora.capacity, lora.default_mm_loras) == (2, 2, {"audio": path})
        assert tokens(llm, prompt, prompt, lora_request=["other", None]) == [heard[0], heard[2]]


def test_sound_without_its_adapter_is_an_error(engine, silent):
    with engine(KIND, max_num_seqs=2) as llm:  # no other test has this engine
        llm.front.client.call("unload_lora", "audio")
        with pytest.raises(
            ValidationError,
            match="the prompt has audio, for which the LoRA adapter 'audio' is used, and that is not loaded",
        ):
            tokens(llm, given(KIND, TEXT, [sound(1)]))
        assert tokens(llm, SILENT) == [silent]


def resolved(path: str, **options: Any) -> Any:
    return resolve_config(engine_config({"model": path, **options}))


def test_configurations(path: str, other: str, tmp_path: Path):
    assert resolved(path).config.lora.max_lora_rank == 6
    for option in ({"language_model_only": True}, {"limit_mm_per_prompt": {"audio": 0}}):
        assert not resolved(path, **option).config.lora.enable_lora
    given = resolved(path, enable_lora=True, max_loras=2, max_cpu_loras=3).config.lora
    assert (given.max_loras, given.max_cpu_loras, given.max_lora_rank) == (3, 4, 16)
    with pytest.raises(ConfigError, match="'audio' is the name of an adapter of default_mm_loras"):
        resolved(path, enable_lora=True, lora_modules={"audio": other})
    bare = tmp_path / "bare"
    shutil.copytree(path, bare, ignore=lambda *_: [CONFIG, WEIGHTS])
    without = resolved(str(bare))
    assert "the checkpoint has no adapter_config.json" in why_no_audio(without)
    assert not without.config.lora.enable_lora
    named = resolved(str(bare), enable_lora=True, default_mm_loras={"audio": other})
    assert why_no_audio(named) == ""


def test_patterns_of_ranks(path: str, tmp_path: Path):
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"rank_pattern": {"v_proj": 9}}))
    assert resolved(str(tmp_path)).config.lora.max_lora_rank == 9


@pytest.mark.parametrize(
    ("kinds", "adapter", "expected"),
    [
        ((), None, None), (("audio",), None, "audio"), (("audio", "audio"), None, "audio"), (("image",), None, "image"),
        (("image", "audio"), None, None), (("video",), None, None), (("video", "audio"), None, "audio"), (("audio",), "own", "own"),
    ],
)  # fmt: skip
def test_the_adapter_of_a_request(kinds, adapter, expected):
    """As in vLLM: of the only kind of its media that has an adapter, if the request names none."""
    names = {name: SimpleNamespace(version=f"version of {name}") for name in ("audio", "image", "own")}  # fmt: skip
    versions = {one.version: SimpleNamespace(waiting={}) for one in names.values()}
    registry: Any = SimpleNamespace(names=names, versions=versions)
    gate = LoraGate(registry, 1, ["audio", "image"])
    media = [MediaItem("x", kind, 0, 1, b"") for kind in kinds]
    request = EngineRequest("a", [1], SamplingParams(), media=media, adapter=adapter)
    found = gate.receive(request, 7).adapter
    assert found == (expected and f"version of {expected}")
    assert [one for one in versions if versions[one].waiting] == ([found] if found else [])
