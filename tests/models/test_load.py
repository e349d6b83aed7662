"""Every weight format gives the same tensors; what does not fit is refused in words that name it."""

from __future__ import annotations

import gc
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.models.checkpoint_files import tensors, weight_bytes
from tests.models.cases import Case, edit_config, save, write
from tests.models.harness import Runner
from tests.models.test_native import build, plain, texts


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, changed: dict[str, Tensor]) -> None:
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def same(a: nn.Module, b: nn.Module) -> bool:
    one, two = parameters(a), parameters(b)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# ------------------------------------------------------------------------------------ formats


def sharded(folder: Path, theirs: nn.Module) -> str:
    (folder / "model.safetensors").unlink()
    save(theirs, folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return "auto"


def pickled(folder: Path, theirs: nn.Module) -> str:
    torch.save(weights(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return "auto"


def sharded_pickles(folder: Path, theirs: nn.Module) -> str:
    found = list(weights(folder).items())
    names = {}
    for number, part in enumerate((found[:9], found[9:])):
        torch.save(dict(part), folder / f"pytorch_model-{number}.bin")
        names.update({name: f"pytorch_model-{number}.bin" for name, _ in part})
    index = {"metadata": {}, "weight_map": names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return "auto"


def old_pickle(folder: Path, theirs: nn.Module) -> str:
    """Nested, and as torch wrote before 1.6; beside a file that holds no weights."""
    state = {"state_dict": weights(folder), "epoch": 3}
    torch.save(state, folder / "model.pt", _use_new_zipfile_serialization=False)
    torch.save({"lr": 1.0}, folder / "optimizer.pt")
    (folder / "model.safetensors").unlink()
    return "pt"


def asked_for_pickle(folder: Path, theirs: nn.Module) -> str:
    torch.save(weights(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").write_bytes(b"not looked at")
    return "pt"


def numpy_cache(folder: Path, theirs: nn.Module) -> str:
    pickled(folder, theirs)
    return "npcache"


def packed_parts(folder: Path, theirs: nn.Module) -> str:
    """Some checkpoints hold q, k, v together, and gate, up."""
    found = weights(folder)
    for layer in range(2):
        at = f"model.layers.{layer}"
        for names, whole in (
            (("q_proj", "k_proj", "v_proj"), "self_attn.qkv_proj"),
            (("gate_proj", "up_proj"), "mlp.gate_up_proj"),
        ):
            inner = whole.split(".")[0]
            parts = [found.pop(f"{at}.{inner}.{name}.weight") for name in names]
            found[f"{at}.{whole}.weight"] = torch.cat(parts)
    rewrite(folder, found)
    return "safetensors"


def bare(folder: Path, theirs: nn.Module) -> str:
    """Saved by a decoder without its head's wrapper, with tensors that are worked out."""
    found = {name.removeprefix("model."): tensor for name, tensor in weights(folder).items()}
    found["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    rewrite(folder, found)
    return "auto"


FORMATS = (
    *(sharded, pickled, sharded_pickles, old_pickle, asked_for_pickle),
    *(numpy_cache, packed_parts, bare),
)


@pytest.mark.parametrize("change", FORMATS, ids=lambda change: change.__name__)
def test_every_file_format_loads_the_same_tensors(change, original, copy: Path) -> None:
    folder, theirs = original
    wanted = build(folder)
    load_format = change(copy, theirs)
    assert same(build(copy, load_format=load_format), wanted)
    if load_format == "npcache":
        (copy / "pytorch_model.bin").write_bytes(b"now the cache is read")
        assert same(build(copy, load_format=load_format), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_are_converted_once(original, dtype: str) -> None:
    model = build(original[0], dtype=dtype)
    stored, kind = weights(original[0]), getattr(torch, dtype)
    assert {p.dtype for p in model.parameters()} == {kind}
    at = "model.layers.1.self_attn"
    parts = [stored[f"{at}.{name}_proj.weight"].to(kind) for name in "qkv"]
    assert torch.equal(model.get_parameter(f"{at}.qkv.weight"), torch.cat(parts))
    want = stored["model.embed_tokens.weight"].to(kind)
    assert torch.equal(model.get_parameter("model.embed_tokens.weight"), want)


def test_bfloat16_survives_numpy(copy: Path) -> None:
    torch.save({"a": torch.randn(3, 5).bfloat16(), "b": torch.ones(2)}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    wanted = dict(tensors(str(copy), "pt"))
    for _ in range(2):  # written, then read
        got = dict(tensors(str(copy), "npcache"))
        assert all(got[n].dtype == t.dtype and torch.equal(got[n], t) for n, t in wanted.items())


def test_whole_tensors_stay_in_the_mapped_file(copy: Path) -> None:
    """No copy: the parameter maps the file's pages, so a change of the file is visible."""
    model = build(copy)
    held = model.get_parameter("model.layers.0.self_attn.o_proj.weight")
    before = held.clone()
    file = copy / "model.safetensors"
    raw = bytearray(file.read_bytes())
    at = raw.find(before.numpy().tobytes())
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"\0" * 4)
    assert held.flatten()[0] == 0
    assert not torch.equal(held, before)


def test_ready_to_run(original) -> None:
    model = build(original[0])
    assert not model.training
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert model.vocab_size == 131
    sizes = sum(t.numel() * 4 for t in weights(original[0]).values())
    assert sum(p.numel() * 4 for p in model.parameters()) == sizes
    assert weight_bytes(str(original[0])) == sizes
    gc.collect()


# ------------------------------------------------------------------------------------ dummy weights


def test_dummy_weights_follow_the_seed_and_need_no_files(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    one = build(copy, load_format="dummy")
    assert same(one, build(copy, load_format="dummy"))
    other = build(copy, load_format="dummy", seed=5)
    for name, tensor in parameters(one).items():
        assert tensor.isfinite().all()
        assert not torch.equal(tensor, other.get_parameter(name))
    got = Runner(one).prefill(0, texts()[0])
    assert 0.01 < got.std() < 10
    config = json.loads((copy / "config.json").read_text())
    assert weight_bytes(str(copy), config, "dummy") > 0


# ------------------------------------------------------------------------------------ heads


def test_tied_head_is_one_table(copy: Path) -> None:
    edit_config(copy, tie_word_embeddings=True)
    found = weights(copy)
    found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    rewrite(copy, found)
    model = build(copy)
    assert "lm_head.weight" not in parameters(model)
    assert model.lm_head.ref.weight is model.get_parameter("model.embed_tokens.weight")


def test_tied_head_stored_under_the_heads_name(copy: Path) -> None:
    edit_config(copy, tie_word_embeddings=True)
    found = weights(copy)
    table = found["lm_head.weight"] = found.pop("model.embed_tokens.weight")
    rewrite(copy, found)
    assert torch.equal(build(copy).lm_head.ref.weight, table)


def test_a_head_of_its_own_wins_over_a_wrong_config(original, copy: Path, caplog) -> None:
    """As Transformers has it: two different tables are not one."""
    edit_config(copy, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        model = build(copy)
    assert "separate head" in caplog.text
    text = texts()[1]
    assert (Runner(model).prefill(0, text) - plain(original[1], text)).abs().max() < 1e-4


# ------------------------------------------------------------------------------------ what does not fit


def spoil_missing(folder: Path) -> str:
    found = weights(folder)
    del found["model.layers.1.self_attn.k_proj.weight"], found["lm_head.weight"]
    rewrite(folder, found)
    return r"lacks 2 .* lm_head\.weight, model\.layers\.1\.self_attn\.k_proj\.weight"


def spoil_unexpected(folder: Path) -> str:
    rewrite(folder, {**weights(folder), "model.layers.1.self_attn.q_proj.bias": torch.ones(64)})
    return r"1 tensors that Qwen3 does not use: model\.layers\.1\.self_attn\.q_proj\.bias.*--model-impl transformers"


def spoil_shape(folder: Path) -> str:
    found = weights(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    found[name] = found[name][:-1].contiguous()
    rewrite(folder, found)
    return r"model\.layers\.0\.mlp\.up_proj\.weight has shape \[71, 48\].*\[72, 48\]"


def spoil_cut(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return "is truncated"


def spoil_header(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    return "not a complete safetensors file"


def spoil_gone(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "has no weights.*load-format dummy"


def spoil_index(folder: Path) -> str:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "1 are missing: model-1.safetensors"


def spoil_index_outside(folder: Path) -> str:
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder.parent / "elsewhere.safetensors").write_bytes(b"")
    return "outside its directory"


def spoil_index_json(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("[1]")
    return "is not a weight index"


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a pickle ran code')",)


def spoil_pickle(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    torch.save({"a": Bomb()}, folder / "pytorch_model.bin")
    return "cannot be read as weights only.*convert it to safetensors"


def spoil_plain_pickle(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    return "cannot be read as weights only"


def spoil_other_pickle(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")
    return "contains a list, not a dict of tensors"


def spoil_empty_pickle(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    return "cannot be read as weights only"


SPOILT = [value for name, value in list(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_mismatched_tensors_are_named(spoil, copy: Path) -> None:
    said = spoil(copy)
    with pytest.raises(ConfigError, match=said) as caught:
        build(copy, model_impl="quire")
    assert "\n" not in str(caught.value)


def test_layers_that_the_config_cuts_off_are_not_missed(copy: Path, caplog) -> None:
    edit_config(copy, num_hidden_layers=1, layer_types=None)
    with caplog.at_level(logging.WARNING):
        model = build(copy)
    assert len(model.attention_layers()) == 1
    assert "11 tensors of the checkpoint are not used: model.layers.1." in caplog.text


def test_a_head_that_we_do_not_run_is_mentioned(original, copy: Path, caplog) -> None:
    rewrite(copy, {**weights(copy), "value_head.weight": torch.ones(1)})
    with caplog.at_level(logging.WARNING):
        assert same(build(copy), build(original[0]))
    assert "1 tensors of the checkpoint are not used: value_head.weight" in caplog.text


def test_a_window_beyond_the_context_is_ignored(tmp_path: Path) -> None:
    theirs = write(Case("", "mistral", {"sliding_window": 20}), tmp_path)
    narrow, wide = build(tmp_path, max_model_len=21), build(tmp_path, max_model_len=20)
    assert [layer.spec.window for layer in narrow.attention_layers()] == [20, 20]
    assert [layer.spec.window for layer in wide.attention_layers()] == [None, None]
    text = texts()[0][:20]
    want = plain(theirs, text)
    for model in (narrow, wide):
        assert (Runner(model).prefill(0, text) - want).abs().max() < 1e-4
