"""Reading adapters: what is accepted, and what is refused with its name and a remedy."""

from __future__ import annotations

import io
import json
import random
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora.adapters import PREFIX, SIZES, tensors, write
from safetensors.torch import save_file

from quire.errors import ValidationError
from quire.features.lora import adapter_files
from quire.features.lora.adapter_files import AdapterFiles, read_adapter
from quire.features.lora.adapter_modules import Targets

TARGETS = {f"model.layers.{i}.{name}": size for i in range(3) for name, size in SIZES.items()}
TARGETS |= {"model.embed_tokens": (211, 64), "lm_head": (64, 211)}
Q = "model.layers.0.self_attn.q_proj"


def read(folder: str | Path, max_rank: int = 8, chosen: tuple[str, ...] = ()) -> AdapterFiles:
    return read_adapter(Path(folder), max_rank, Targets(TARGETS), chosen)


def test_ranks_and_scales_follow_the_patterns(tmp_path: Path) -> None:
    made = tensors(4, 0)
    wide = f"{PREFIX}model.layers.1.mlp.down_proj.lora_"
    made[wide + "A.weight"], made[wide + "B.weight"] = torch.randn(6, 96), torch.randn(64, 6)
    fields = {
        "rank_pattern": {"layers.1.mlp.down_proj": 6},
        "alpha_pattern": {r"layers\.[01]\.self_attn\..*": 3, "q_proj": 100},
    }
    modules = read(write(tmp_path, 4, made=made, **fields)).modules()
    assert modules["model.layers.1.mlp.down_proj"].scale == 8 / 6
    assert modules[Q].scale == 3 / 4  # the first pattern that matches
    assert modules["model.layers.2.self_attn.q_proj"].scale == 100 / 4
    assert modules["model.layers.2.mlp.down_proj"].scale == 8 / 4
    rooted = read(write(tmp_path, 4, made=made, **fields, use_rslora=True)).modules()
    assert rooted["model.layers.1.mlp.down_proj"].scale == 8 / 6**0.5


def test_equal_content_has_the_same_digest(tmp_path: Path) -> None:
    one, same = write(tmp_path / "a", seed=1), write(tmp_path / "b", seed=1)
    assert read(one).digest == read(same).digest
    others = [write(tmp_path / "c", seed=2), write(tmp_path / "d", seed=1, lora_alpha=9)]
    assert len({read(each).digest for each in [one, *others]}) == 3


@pytest.mark.parametrize("prefix", ["", PREFIX])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_forms_of_files(prefix: str, suffix: str, tmp_path: Path) -> None:
    made = {prefix + name.removeprefix(PREFIX): tensor for name, tensor in tensors(4, 0).items()}
    write(tmp_path, made=made)
    if suffix == "bin":
        (tmp_path / "adapter_model.safetensors").unlink()
        torch.save(made, tmp_path / "adapter_model.bin")
    found = read(tmp_path).modules()
    assert set(found) == set(TARGETS) - {"model.embed_tokens", "lm_head"}
    assert torch.equal(found[Q].a_RI, made[f"{prefix}{Q}.lora_A.weight"])


def test_only_chosen_modules_are_read(tmp_path: Path) -> None:
    found = read(write(tmp_path), chosen=("q_proj", "v_proj")).modules()
    assert {name.rpartition(".")[2] for name in found} == {"q_proj", "v_proj"}
    with pytest.raises(ValidationError, match="lora_target_modules"):
        read(tmp_path, chosen=("qkv",))


IGNORED = {
    "lora_dropout": 0.5, "fan_in_fan_out": True, "layers_to_transform": [1], "layers_pattern": "layers",
    "exclude_modules": ["k_proj"], "target_modules": r".*\.q_proj", "task_type": "CAUSAL_LM", "inference_mode": False,
    "base_model_name_or_path": "elsewhere/model", "megatron_config": {"a": 1}, "eva_config": {"rho": 2.0},
    "init_lora_weights": "gaussian", "revision": "main", "peft_version": "0.21.2", "runtime_config": {},
}  # fmt: skip


def test_fields_of_training_have_no_effect(tmp_path: Path) -> None:
    plain = read(write(tmp_path / "a")).modules()
    other = read(write(tmp_path / "b", **IGNORED)).modules()
    assert all(torch.equal(plain[name].a_RI, other[name].a_RI) for name in plain)
    assert plain[Q].scale == other[Q].scale


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type='IA3'"),
    ({"peft_type": None}, "peft_type=None"),
    ({"r": None}, "r missing"),
    ({"lora_alpha": None}, "lora_alpha missing"),
    ({"r": 0}, "r=0"),
    ({"r": True}, "r=True"),
    ({"r": 5}, "rank 4, but adapter_config.json says 5"),
    ({"lora_alpha": "8"}, "lora_alpha='8'"),
    ({"lora_alpha": 1e400}, "lora_alpha=inf"),
    ({"bias": "some"}, "bias='some'"),
    ({"use_rslora": "yes"}, "use_rslora='yes'"),
    ({"use_dora": True}, "no lora_magnitude_vector"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'.*path_initial"),
    ({"init_lora_weights": "olora"}, "init_lora_weights"),
    ({"init_lora_weights": "corda"}, "init_lora_weights"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights"),
    ({"init_lora_weights": ["eva"]}, "init_lora_weights"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ({"use_qalora": True}, "use_qalora"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
    ({"trainable_token_indices": [5, 6]}, r"trainable_token_indices=\[5, 6\]"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
    ({"alpha_pattern": {"(": 3}}, "no regular expression"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_other_fields_are_refused_by_name(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=says) as caught:
        read(write(tmp_path, **fields))
    assert str(tmp_path / "adapter_") in str(caught.value)


Change = Callable[[dict[str, torch.Tensor]], Any]
NAME = f"{PREFIX}{Q}.lora_"
WRONG: list[tuple[Change, str]] = [
    (lambda t: t.pop(NAME + "B.weight"), f"{Q} has no tensor b"),
    (lambda t: t.update({NAME + "A.weight": torch.ones(4, 65)}), r"a has shape \[4, 65\].*another base model"),
    (lambda t: t.update({NAME + "B.weight": torch.ones(63, 4)}), r"b has shape \[63, 4\]"),
    (lambda t: t.update({NAME + "A.weight": torch.ones(9, 64), NAME + "B.weight": torch.ones(64, 9)}), "rank 9, but"),
    (lambda t: t.update({NAME + "A.weight": torch.tensor(1.0)}), "rank 0"),
    (lambda t: t.update({NAME + "A.weight": torch.full((4, 64), torch.nan)}), "not finite"),
    (lambda t: t.update({NAME + "A.weight": torch.ones(4, 64, dtype=torch.int8)}), "is I8"),
    (lambda t: t.update({NAME + "magnitude_vector": torch.ones(64)}), "use_dora is false"),
    (lambda t: t.update({f"{PREFIX}model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}), "layers.7.mlp.up_proj"),
    (lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(211, 64)}), "modules_to_save.*lm_head.*0 MB"),
    (lambda t: t.update({f"{PREFIX}strange": torch.ones(4)}), "strange"),
    (lambda t: t.update({f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight": torch.ones(8, 64)}), "target_parameters"),
    (lambda t: t.update({Q + ".lora_A.weight": torch.ones(4, 64)}), "two tensors a"),
    (lambda t: t.clear(), "no LoRA tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_tensors_are_refused_by_name(change: Change, says: str, tmp_path: Path) -> None:
    made = tensors(4, 0)
    change(made)
    with pytest.raises(ValidationError, match=says) as caught:
        read(write(tmp_path, made=made))
    assert "adapter_model.safetensors" in str(caught.value)


def test_a_rank_above_the_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="rank 8, more than max_lora_rank=4"):
        read(write(tmp_path, 8), max_rank=4)


def test_saved_base_layers_are_left_out(tmp_path: Path) -> None:
    made = tensors(4, 0) | {f"{PREFIX}lm_head.base_layer.weight": torch.ones(211, 64)}
    assert "lm_head" not in read(write(tmp_path, made=made)).modules()


@pytest.mark.parametrize(
    ("name", "chosen"),
    [(f"{NAME.removesuffix('.lora_')}.base_layer.weight", ()), (f"{PREFIX}x.lora_A.weight", ("q_proj",))],
)  # fmt: skip
def test_tensors_that_are_not_used_are_not_read(
    name: str, chosen: tuple[str, ...], tmp_path: Path
) -> None:
    """The hole is 1 GiB, without a block on the disk."""
    file = Path(write(tmp_path)) / "adapter_model.safetensors"
    plain, whole = read(tmp_path, chosen=chosen), file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    header[name] = {
        "dtype": "F32",
        "shape": [1 << 14, 1 << 14],
        "data_offsets": [len(data), len(data) + (1 << 30)],
    }
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text + data)
        opened.truncate(8 + len(text) + len(data) + (1 << 30))
    before = _bytes_read()
    modules = read(tmp_path, chosen=chosen).modules()
    assert _bytes_read() - before < 1 << 22
    for module, weights in plain.modules().items():
        assert torch.equal(modules[module].a_RI, weights.a_RI)
        assert torch.equal(modules[module].b_OR, weights.b_OR)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_long_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = Path(write(tmp_path)) / "adapter_model.safetensors"
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", 17 << 20))
        opened.truncate(20 << 20)
    with pytest.raises(ValidationError, match="header of 17825792 bytes, at most 16777216"):
        read(tmp_path)


def test_missing_files_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"No adapter found for .*adapter_config.json"):
        read(tmp_path / "nowhere")
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValidationError, match=r"No adapter found for .*adapter_model.bin"):
        read(tmp_path)


BOMBS = [
    {"(?:(?:(?:a|b){500}){500}){500}": 8},
    {f"(?:a{{{990 + number}}}){{1000}}": 8 for number in range(20)},
    {"(?R)*": 8},
    {"(?P<a>.*)(?P=a)": 8},
    {"(.|.)*[YZ]": 8},
    {"(.+)+[YZ]": 8},
    {".*" * 9: 8},
    {"a?" * 20 + "a" * 20: 8},
    {f"q{number}_proj": 8 for number in range(4097)},
]


@pytest.mark.parametrize("patterns", BOMBS, ids=range(len(BOMBS)))
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_take_time_or_memory_are_refused_at_once(
    patterns: dict[str, int], field: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, **{field: patterns})
    began = time.thread_time()
    with pytest.raises(ValidationError, match=r"pattern"):
        read(folder)
    assert time.thread_time() - began < 0.5


def test_all_patterns_of_an_adapter_have_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, rank_pattern={f".*{number}.*": 3 for number in range(10, 99)})
    read(write(tmp_path / "other", rank_pattern={"nothing.*": 3}))
    monkeypatch.setattr("quire.features.lora.peft_config.MATCH_SECONDS", 1e-4)
    with pytest.raises(ValidationError, match="too long to match"):
        read(folder)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    file = tmp_path / "adapter_model.bin"
    torch.save({"a": Path("code")}, file)
    with pytest.raises(ValidationError, match="weights only"):
        read(tmp_path)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("archive/data.pkl", bytes(1 << 20))
    file.write_bytes(packed.getvalue())
    with pytest.raises(ValidationError, match="compressed"):
        read(tmp_path)
    torch.save({f"{Q}.lora_A.weight": torch.ones(1).expand(1 << 40)}, file)
    with pytest.raises(ValidationError, match="more elements"):
        read(tmp_path)
    torch.save(dict(tensors(4, 0)), file, _use_new_zipfile_serialization=False)
    with pytest.raises(ValidationError, match="damaged, or older"):
        read(tmp_path)
    file.write_bytes(bytes(20 << 20))
    with pytest.raises(ValidationError, match="more than an adapter of rank 8"):
        read(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_damaged_files_are_refused_or_read(suffix: str, tmp_path: Path) -> None:
    """No byte of a file leads to another exception."""
    draw, made = random.Random(7), tensors(2, 0, ("self_attn.q_proj",), layers=1)
    write(tmp_path, 2, made=made)
    file = tmp_path / f"adapter_model.{suffix}"
    if suffix == "bin":
        (tmp_path / "adapter_model.safetensors").unlink()
        torch.save(made, file)
    whole, refused = file.read_bytes(), 0
    for _ in range(150):
        data = bytearray(whole)
        if draw.random() < 0.3:
            del data[draw.randrange(len(data)) :]
        for _ in range(draw.randrange(1, 6)):
            if data:
                data[draw.randrange(min(len(data), draw.choice((64, 700, 1 << 20))))] = (
                    draw.randrange(256)
                )
        file.write_bytes(data)
        try:
            read(tmp_path).modules()
        except ValidationError:
            refused += 1
    assert refused > 30


def test_damaged_configurations_are_refused_or_read(tmp_path: Path) -> None:
    draw = random.Random(3)
    write(tmp_path, rank_pattern={"q_proj": 4}, alpha_pattern={"k_proj": 3}, bias="none")
    file = tmp_path / "adapter_config.json"
    whole, values = file.read_bytes(), [None, -1, 10**400, 1e308, "x", [], {"": {}}, True, [[]] * 3]
    longest = 0
    for number in range(160):
        if number % 2:
            data = bytearray(whole)
            data[draw.randrange(len(data))] = draw.randrange(256)
            file.write_bytes(data)
        else:
            config = json.loads(whole)
            config[draw.choice(list(config))] = draw.choice(values)
            file.write_text(json.dumps(config))
        try:
            read(tmp_path).modules()
        except ValidationError as error:
            longest = max(longest, len(str(error)))
    assert longest < 3000
    file.write_bytes(b"[" * 100_000)
    with pytest.raises(ValidationError, match="not valid JSON"):
        read(tmp_path)


def test_a_lying_header_is_refused_before_memory_is_spent(tmp_path: Path) -> None:
    write(tmp_path)
    size = 4 * 64 * (1 << 34)
    head = json.dumps(
        {f"{Q}.lora_A.weight": {"dtype": "F32", "shape": [4, 64 << 34], "data_offsets": [0, size]}}
    ).encode()
    with (tmp_path / "adapter_model.safetensors").open("wb") as opened:
        opened.write(struct.pack("<Q", len(head)) + head)
        opened.truncate(8 + len(head) + size)  # sparse: a terabyte that takes no room
    with pytest.raises(ValidationError, match=r"lora_A|q_proj"):
        read(tmp_path)


def test_a_file_with_more_than_its_tensors_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with (tmp_path / "adapter_model.safetensors").open("ab") as opened:
        opened.write(b"more")
    with pytest.raises(ValidationError, match="4 bytes after the last tensor"):
        read(tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValidationError, match="no LoRA tensors"):
        read(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    file, places = tmp_path / "adapter_model.safetensors", adapter_files.places_of_tensors
    whole = file.read_bytes()
    for changed in (whole[:-1], bytes(8) + whole[8:], b""):
        file.write_bytes(whole)

        def after_the_header(*args: Any, changed: bytes = changed) -> Any:
            file.write_bytes(changed)
            return places(*args)

        monkeypatch.setattr(adapter_files, "places_of_tensors", after_the_header)
        with pytest.raises(ValidationError, match="changed while it was read"):
            read(tmp_path)


def test_tensors_at_odd_offsets_are_read(tmp_path: Path) -> None:
    """Some writers pad nothing; torch reads such a tensor from a copy."""
    made = tensors(2, 0, ("self_attn.q_proj",), layers=1)
    write(tmp_path, 2, made=made)
    file = tmp_path / "adapter_model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    file.write_bytes(
        struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :]
    )
    found = read(tmp_path).modules()[Q]
    assert torch.equal(found.a_RI, made[f"{PREFIX}{Q}.lora_A.weight"])
    assert torch.equal(found.b_OR, made[f"{PREFIX}{Q}.lora_B.weight"])


@pytest.mark.parametrize(
    ("fields", "part", "value", "said"),
    [
        ({"lora_alpha": 1e30}, None, 0.0, "lora_alpha"),
        ({"alpha_pattern": {"q_proj": -1e20}}, None, 0.0, "lora_alpha"),
        ({}, "A", 3e38, "q_proj.lora_A.weight"),
        ({}, "B", -3e38, "q_proj.lora_B.weight"),
        ({}, "A", 20_000.0, "q_proj.lora_A.weight"),
    ],
)
def test_absurd_values_are_refused(
    tmp_path: Path, fields: dict[str, Any], part: str | None, value: float, said: str
) -> None:
    """Regression: such adapters were loaded, and the requests with them ended with a server error."""
    made = tensors(4, 0)
    if part is not None:
        made[f"{PREFIX}{Q}.lora_{part}.weight"][0, 0] = value
    with pytest.raises(ValidationError, match=said) as caught:
        read(write(tmp_path, 4, made=made, **fields))
    assert "train the adapter again" in str(caught.value)


def test_large_values_that_training_may_give_are_read(tmp_path: Path) -> None:
    made = tensors(4, 0)
    made[f"{PREFIX}{Q}.lora_A.weight"][0, 0] = 500.0
    assert read(write(tmp_path, 4, made=made, lora_alpha=2048)).modules()[Q].scale == 512
