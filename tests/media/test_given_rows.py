"""Rows of the tower in the place of pictures, names of pictures, and options of their processing: the tokens are those of the picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from test_picture_equality import GREEDY, given, passes, prompt_of, tokens
from vision_checkpoints import picture, transformers_model
from vision_server import VisionServer, asking, data_url, image_part

from quire import LLM
from quire.config.picture_options import picture_options
from quire.errors import ConfigError, ValidationError
from quire.frontend.media.media_process import load_processor

TEXT = "What is in @ here?"
WIDE = {"width": 150, "height": 90}


def rows_of(path: str, image: Any) -> tuple[torch.Tensor, Any]:
    """(rows of the tower as Transformers computes them, the grid)."""
    made = load_processor(path).image_processor(image, return_tensors="pt")
    model = transformers_model(path)
    with torch.inference_mode():
        found = model.get_image_features(**made, return_dict=True)
    inner = getattr(found, "deepstack_features", None) or ()
    return torch.cat([flat(found.pooler_output), *map(flat, inner)], -1), made.get("image_grid_thw")


def flat(features: Any) -> torch.Tensor:
    parts = features if isinstance(features, list | tuple) else [features]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def as_data(path: str, image: Any) -> Any:
    rows, grid = rows_of(path, image)
    return rows if grid is None else {"image_embeds": rows, "image_grid_thw": grid}


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "qwen3_vl", "gemma3"])
def test_rows_give_the_tokens_of_their_picture(kind, engine: Callable[..., Any], checkpoint):
    image = picture(1, **WIDE)
    with engine(kind, enable_mm_embeds=True) as llm:
        expected = llm.generate([given(kind, TEXT, [image])], GREEDY, use_tqdm=False)[0]
        before = passes(llm)
        prompt = {"prompt": prompt_of(kind, TEXT), "multi_modal_data": {"image": as_data(checkpoint(kind), image)}}  # fmt: skip
        (found,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.num_cached_tokens < 16 or kind == "gemma3"  # rows have a name of their own
        assert passes(llm) == before


def test_several_items_and_a_picture_beside_rows(engine, checkpoint):
    images = [picture(1), picture(2)]
    with engine("llava", enable_mm_embeds=True) as llm:
        expected = tokens(llm, given("llava", "@ and @", images))
        rows = [rows_of(checkpoint("llava"), one)[0] for one in images]
        for form in (torch.stack(rows), rows, [images[0], rows[1].numpy()]):
            prompt = {"prompt": prompt_of("llava", "@ and @"), "multi_modal_data": {"image": form}}
            assert tokens(llm, prompt) == expected
    with engine("qwen2_vl", enable_mm_embeds=True) as llm:
        images = [picture(1, **WIDE), picture(2)]
        expected = tokens(llm, given("qwen2_vl", "@ and @", images))
        made = [rows_of(checkpoint("qwen2_vl"), one) for one in images]
        both = {"image_embeds": torch.cat([rows for rows, _ in made]), "image_grid_thw": torch.cat([grid for _, grid in made])}  # fmt: skip
        prompt = {"prompt": prompt_of("qwen2_vl", "@ and @"), "multi_modal_data": {"image": both}}
        assert tokens(llm, prompt) == expected


WRONG = [
    (torch.zeros(16, 63), "63 numbers for each row; a row of this model's vision tower has 64"),
    (torch.zeros(65, 64), "65 rows; the limit is 64"),
    (torch.full((16, 64), float("nan")), "not finite"),
    (torch.zeros(0, 64), "the shape"),
    (torch.zeros(16, 64, dtype=torch.float64), "float64"),
    ({"image_embeds": torch.zeros(16, 64), "other": 1}, "has the keys"),
]


@pytest.mark.parametrize(("rows", "words"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_wrong_rows(rows, words, engine):
    prompt = {"prompt": prompt_of("llava", TEXT), "multi_modal_data": {"image": rows}}
    with engine("llava", enable_mm_embeds=True) as llm, pytest.raises(ValidationError, match=words):
        llm.generate([prompt], GREEDY, use_tqdm=False)


def test_rows_need_the_flag_and_a_model_whose_rows_are_in_one_piece(engine):
    prompt = {"prompt": prompt_of("llava", TEXT), "multi_modal_data": {"image": torch.zeros(16, 64)}}  # fmt: skip
    with engine("llava") as llm, pytest.raises(ValidationError, match="--enable-mm-embeds"):
        llm.generate([prompt], GREEDY, use_tqdm=False)
    with engine("qwen2_vl", enable_mm_embeds=True) as llm:
        prompt["prompt"] = prompt_of("qwen2_vl", TEXT)
        with pytest.raises(ValidationError, match="needs its grid"):
            llm.generate([prompt], GREEDY, use_tqdm=False)
        data = {"image_embeds": torch.zeros(16, 64), "image_grid_thw": [[1, 4, 4]]}
        with pytest.raises(ValidationError, match="16 rows for a grid of 1x4x4"):
            llm.generate([prompt | {"multi_modal_data": {"image": data}}], GREEDY, use_tqdm=False)


def test_without_pictures_the_tower_is_not_loaded(engine, checkpoint):
    prompt = {"prompt": prompt_of("llava", TEXT), "multi_modal_data": {"image": as_data(checkpoint("llava"), picture(1))}}  # fmt: skip
    with engine("llava", enable_mm_embeds=True) as llm:
        expected = tokens(llm, prompt)
    with engine("llava", enable_mm_embeds=True, limit_mm_per_prompt={"image": 0}) as llm:
        assert tokens(llm, prompt) == expected
        (hook,) = [one for one in llm.client.core.executor.worker.hooks if one.name == "media"]
        assert hook.encoder.tower is None
        with pytest.raises(ValidationError, match="the limit is 0"):
            tokens(llm, given("llava", TEXT, [picture(1)]))


# -- names and options ----------------------------------------------------------------------------
def test_names_in_a_program(engine):
    first = given("llava", TEXT, [picture(1)]) | {"multi_modal_uuids": {"image": ["mine"]}}
    again = given("llava", TEXT, [None]) | {"multi_modal_uuids": {"image": "mine"}}
    with engine("llava") as llm:
        expected = tokens(llm, first)
        assert tokens(llm, again) == expected
        other = tokens(llm, first | {"multi_modal_data": {"image": picture(2)}})
        assert (
            other != expected
        )  # a name never stands for another picture than the one that came with it
        assert tokens(llm, again) == other
        with pytest.raises(ValidationError, match="no item of this `uuid`"):
            tokens(llm, again | {"cache_salt": "another"})
        for wrong in ({"image": ["a", "b"]}, {"image": [7]}, "mine", {"image": ["x" * 129]}):
            with pytest.raises(ValidationError, match="multi_modal_uuids"):
                tokens(llm, first | {"multi_modal_uuids": wrong})
        with pytest.raises(ValidationError, match="give it a name"):
            tokens(llm, given("llava", TEXT, [None]))


def test_options_of_a_request_and_of_the_engine(engine):
    image = picture(1, 300, 300)
    small = {"max_pixels": 56 * 56 * 4}
    with engine("qwen2_vl") as llm:
        plain = llm.generate([given("qwen2_vl", TEXT, [image])], GREEDY, use_tqdm=False)[0]
        own = given("qwen2_vl", TEXT, [image]) | {"mm_processor_kwargs": small}
        asked = llm.generate([own], GREEDY, use_tqdm=False)[0]
        call = llm.generate([given("qwen2_vl", TEXT, [image])], GREEDY, use_tqdm=False, mm_processor_kwargs=small)[0]  # fmt: skip
        assert len(asked.prompt_token_ids) < len(plain.prompt_token_ids)
        assert passes(llm) == 2  # the picture of other options is another one
        content = [{"type": "image_pil", "image_pil": image}]
        chat = [llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False, mm_processor_kwargs=kwargs)[0] for kwargs in (None, small)]  # fmt: skip
        assert len(chat[1].prompt_token_ids) < len(chat[0].prompt_token_ids)
        with pytest.raises(ValidationError, match="this server plans for"):
            tokens(llm, own | {"mm_processor_kwargs": {"max_pixels": 28 * 28 * 50, "min_pixels": 28 * 28 * 48}})  # fmt: skip
        with pytest.raises(ValidationError, match="has no crop_to_patches"):
            tokens(llm, own | {"mm_processor_kwargs": {"crop_to_patches": True}})
    with engine("qwen2_vl", mm_processor_kwargs=small) as llm:
        found = llm.generate([given("qwen2_vl", TEXT, [image])], GREEDY, use_tqdm=False)[0]
    assert found.prompt_token_ids == asked.prompt_token_ids == call.prompt_token_ids
    assert found.outputs[0].token_ids == asked.outputs[0].token_ids == call.outputs[0].token_ids


def test_later_options_win_and_only_known_ones_are_taken():
    options = picture_options({"max_pixels": 5, "size": {"height": 1, "width": 2}, "images_kwargs": {"max_pixels": 7, "size": {"width": 3}}})  # fmt: skip
    assert options == {"max_pixels": 7, "size": {"height": 1, "width": 3}}
    for wrong in (
        {"a": 1}, {"max_pixels": 0}, {"max_pixels": True}, {"max_patches": 65}, {"size": {"height": "1"}}, {"size": {}},
        {"images_kwargs": 1}, {"crop_to_patches": 1}, [], {"num_frames": 769}, {"text_kwargs": {"padding": True}},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be|unknown key"):
            picture_options(wrong)
    with pytest.raises(ConfigError, match="mm_processor_kwargs"):
        LLM("none", mm_processor_kwargs={"a": 1})


# -- over HTTP ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server(checkpoint, processes):
    path = checkpoint("qwen2_vl")
    made = VisionServer(path, processes(path), enable_mm_embeds=True, trust_request_mm_kwargs=True)
    yield made
    made.close()


def numpy_file(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def answer(server: VisionServer, body: Any, path: str = "/v1/chat/completions") -> Any:
    found = server.ask(path, body)
    assert found.status_code == 200, found.text
    return found.json()


def test_rows_in_a_chat(server, checkpoint):
    from vision_checkpoints import as_file

    image, text = picture(1, **WIDE), {"type": "text", "text": "What?"}
    expected = answer(server, asking(image_part(data_url(as_file(image))), text))
    rows, grid = rows_of(checkpoint("qwen2_vl"), image)
    for file in (base64.b64encode(save({"rows": rows})).decode(), numpy_file(rows.numpy())):
        part = {"type": "image_embeds", "image_embeds": {"image_embeds": file, "image_grid_thw": grid.tolist()}, "uuid": "rows"}  # fmt: skip
        found = answer(server, asking(part, text))
        assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    again = {"type": "image_embeds", "image_embeds": None, "uuid": "rows"}
    found = answer(server, asking(again, text))
    assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    pickled = io.BytesIO()
    torch.save(rows, pickled)
    part["image_embeds"]["image_embeds"] = base64.b64encode(pickled.getvalue()).decode()
    message, where = server.refused(part)
    assert ("torch.save" in message, where) == (True, "messages[0].content[0].image_embeds")
    part["image_embeds"]["image_embeds"] = "A" * 100_000
    assert "characters of base64" in server.refused(part)[0]


def test_options_in_a_chat(server, monkeypatch):
    from vision_checkpoints import as_file

    part = image_part(data_url(as_file(picture(1, 300, 300))))
    counts = [
        answer(server, asking(part, mm_processor_kwargs=kwargs))["usage"]["prompt_tokens"]
        for kwargs in ({}, {"images_kwargs": {"max_pixels": 56 * 56 * 4}})
    ]  # fmt: skip
    assert counts[1] < counts[0]
    body = {"messages": asking(part)["messages"], "mm_processor_kwargs": {"max_pixels": 56 * 56 * 4}}  # fmt: skip
    assert server.ask("/tokenize", body).json()["count"] == counts[1]
    assert server.refused(part, mm_processor_kwargs={"a": 1})[1] == "mm_processor_kwargs"
    assert server.refused(part, media_io_kwargs={"a": 1})[1] == "media_io_kwargs"
    trusted = server.state.config.media
    object.__setattr__(trusted, "trust_request_mm_kwargs", False)
    try:
        message, where = server.refused(part, mm_processor_kwargs={"max_pixels": 1})
        assert ("--trust-request-mm-kwargs" in message, where) == (True, "mm_processor_kwargs")
    finally:
        object.__setattr__(trusted, "trust_request_mm_kwargs", True)
