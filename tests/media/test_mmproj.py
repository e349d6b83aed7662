"""GGUF language models with a vision tower in a file `mmproj*.gguf`, compared with the checkpoints that both were made of."""

from __future__ import annotations

import copy
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from mmproj_files import PROJECTORS, write_language_model, write_mmproj
from small_engine import SMALL
from test_picture_equality import COUNT, given, peer
from vision_checkpoints import CHECKPOINTS, make_checkpoint, picture

from quire import LLM, SamplingParams
from quire.cli.doctor import main as doctor
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.errors import ConfigError, ModelNotFound, QuireError, Unsupported
from quire.frontend.media.prompt_reader import media_inputs
from quire.models.checkpoint_locator import locate
from quire.models.gguf.families import config_of
from quire.models.gguf.projector import projector_places, read_projector, wrapper_texts
from quire.models.json_files import read_object
from quire.models.vision_towers.load import construct_tower

TEXT, PICTURES = "What is in @ and @? Say it.", [picture(1, 150, 90), picture(2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], str]) -> Callable[[str], Path]:  # fmt: skip
    """The checkpoint of a kind. GGUF's Gemma 3 has a full layer after five with windows, so it is one of its own."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made and kind == "gemma3":
            entry = copy.deepcopy(CHECKPOINTS[kind])
            text = entry["config"]["text_config"]
            del text["layer_types"]
            text["num_hidden_layers"] = 6
            made[kind] = Path(make_checkpoint({"model_type": kind, **entry}, tmp_path_factory.mktemp("gemma")))  # fmt: skip
        elif kind not in made:
            made[kind] = Path(checkpoint(kind))
        return made[kind]

    return get


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, whole: Callable[[str], Path]) -> Callable[[str], Path]:  # fmt: skip
    """The file of the language model of a kind; its vision tower lies beside it."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-gguf")
            write_mmproj(whole(kind), folder / "mmproj-F32.gguf")
            made[kind] = write_language_model(whole(kind), folder / "model.gguf")
        return made[kind]

    return get


@pytest.fixture
def served(same_process: Any) -> Callable[..., Any]:
    @contextmanager
    def started(file: Path, **options: Any) -> Iterator[LLM]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with LLM(str(file), **{**SMALL, **options}) as llm:
                media_inputs(llm.front).processes = same_process(
                    media_inputs(llm.front).processes.folder
                )
                yield llm
        finally:
            torch.set_num_threads(threads)

    return started


def first_tokens(llm: LLM, kind: str) -> Any:
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=20)
    (out,) = llm.generate([given(kind, TEXT, PICTURES)], params, use_tqdm=False)
    return out


@pytest.mark.parametrize("kind", list(PROJECTORS))
def test_tokens_are_those_of_the_checkpoint(kind: str, files: Any, whole: Any, served: Any) -> None:
    prompt, expected, logits_V = peer(str(whole(kind)), kind, TEXT, PICTURES)
    with served(files(kind)) as llm:
        out = first_tokens(llm, kind)
    assert out.prompt_token_ids == prompt
    assert list(out.outputs[0].token_ids) == expected
    logprobs_V = logits_V.float().log_softmax(-1)
    for token, entry in out.outputs[0].logprobs[0].items():
        assert abs(entry.logprob - float(logprobs_V[token])) < 1e-3


def test_doctor_says_what_the_tower_costs(files: Any, capsys: Any) -> None:
    doctor([str(files("llava")), "--max-model-len", "512"])
    said = capsys.readouterr().out
    assert "vision tower" in said
    assert "16 tokens" in said
    assert "would not start" not in said


@pytest.mark.parametrize("kind", [Kind.F16, pytest.param(Kind.BF16, marks=pytest.mark.slow), pytest.param(Kind.Q8_0, marks=pytest.mark.slow)])  # fmt: skip
def test_a_tower_of_other_types_from_another_directory(kind: Kind, files: Any, whole: Any, served: Any, tmp_path: Path) -> None:  # fmt: skip
    tower = write_mmproj(whole("llava"), tmp_path / "tower.gguf", kind)
    (tmp_path / "model").mkdir()
    model = Path(shutil.copy(files("llava"), tmp_path / "model"))
    *_, logits_V = peer(str(whole("llava")), "llava", TEXT, PICTURES)
    with served(model, mmproj=str(tower)) as llm:
        out = first_tokens(llm, "llava")
    logprobs_V = logits_V.float().log_softmax(-1)
    differences = [abs(entry.logprob - float(logprobs_V[token])) for token, entry in out.outputs[0].logprobs[0].items()]  # fmt: skip
    assert 0 < max(differences) < (0.5 if kind == Kind.Q8_0 else 0.2)


def test_files_that_do_not_fit(files: Any, whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """Named with --mmproj they are an error; beside the model they are left out, as text may be all that is wanted."""
    shutil.copy(files("llava"), tmp_path / "a.gguf")
    tower = Path(shutil.copy(files("gemma3").with_name("mmproj-F32.gguf"), tmp_path))
    model = ModelConfig(model=str(tmp_path / "a.gguf"))
    with caplog.at_level(logging.WARNING):
        assert "vision_config" not in read_object(Path(locate(model, LoadConfig())) / "config.json")
    assert "served without pictures" in caplog.text
    wrong: list[tuple[ModelConfig, str, type[Exception], str]] = [
        (model, str(tower), ConfigError, "is for models of the architecture gemma3; a.gguf is llama"),
        (model, str(tmp_path / "none.gguf"), ModelNotFound, "does not exist"),
        (model, str(tmp_path / "a.gguf"), Unsupported, "no vision tower"),
        (ModelConfig(model=str(whole("llava"))), str(tower), ConfigError, "is no GGUF model"),
        (ModelConfig(model=str(tower)), str(tower), Unsupported, "pass the file of the language model"),
    ]  # fmt: skip
    for model_of, mmproj, error, says in wrong:
        with pytest.raises(error, match=says):
            locate(model_of, LoadConfig(mmproj=mmproj))
    shutil.copy(tower, tmp_path / "mmproj-2.gguf")
    with caplog.at_level(logging.WARNING):
        locate(model, LoadConfig())
    assert "has 2 vision towers (mmproj-2.gguf, mmproj-F32.gguf): pass one with --mmproj" in caplog.text  # fmt: skip


@pytest.mark.parametrize("kind", ["llava_next", "gemma3", "qwen2_5_vl"])
def test_mutated_towers_are_refused_by_name(kind: str, files: Any, tmp_path: Path) -> None:
    """A value or a shape of the header is changed: the file is refused, or means something whose weights are there."""
    from quire.models.gguf.header import read_header
    from quire.models.gguf.tokenizer import GgufTokenizer

    whole, draw = files(kind).with_name("mmproj-F32.gguf").read_bytes(), random.Random(0)
    language = read_header(files(kind))
    config, file = config_of(language), tmp_path / "x.gguf"
    end = whole.index(b"blk.0.ffn_down.weight") + 60
    refused = 0
    for turn in range(100):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(end)] = draw.choice((0, 1, 255, draw.randrange(256)))
        file.write_bytes(data)
        try:
            projector = read_projector(file)
            texts = wrapper_texts(projector, language, config, GgufTokenizer(language))
            width = config["hidden_size"]
            tower = construct_tower(cast(Any, texts["config.json"]), width, torch.float32)
            places = {each.name: torch.empty(each.shape, device="meta") for each in projector_places(projector)}  # fmt: skip
            assert places
            assert sum(1 for _ in tower.modules()) < 500, turn
        except QuireError as why:
            assert str(file) in str(why)  # noqa: PT017
            refused += 1
    assert 10 < refused < 100


def test_a_model_without_a_token_for_pictures(files: Any, tmp_path: Path) -> None:
    """As of LLaVA's first files: the unknown token of SentencePiece stands for pictures, which texts never have."""
    from quire.models.gguf.header import read_header
    from quire.models.gguf.tokenizer import GgufTokenizer

    header = read_header(files("llava"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a"]
    own = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens), "token_type": [2, 3, 3, *[6] * 256, 1, 1], "unknown_token_id": 0}  # fmt: skip
    header.metadata.update({f"tokenizer.ggml.{key}": value for key, value in own.items()})
    tokenizer = GgufTokenizer(header)
    tokenizer.stand_for("<image>")
    assert tokenizer.ids["<image>"] == 0
    made = tokenizer.tokenizer_json()
    assert made["model"]["unk_token"] == "<image>"
    assert {"id": 0, "content": "<image>"}.items() <= made["added_tokens"][0].items()
