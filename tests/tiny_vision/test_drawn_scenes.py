"""The drawn world and its questions; conversations beside each other equal each alone; a run that stops, goes on, and is published."""

from __future__ import annotations

import hashlib
import random
from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_model.published import text_weights
from tools.tiny_model.train import load_weights, shape_of
from tools.tiny_vision import export, train
from tools.tiny_vision.accuracy import held_out
from tools.tiny_vision.batches import Wanted, batch
from tools.tiny_vision.conversations import Conversations
from tools.tiny_vision.dense import COLOUR_CLASSES, Captions, labels
from tools.tiny_vision.dense import KINDS as SEEN
from tools.tiny_vision.network import Batch, Eyes, Network, Sight
from tools.tiny_vision.pictures import TINTS, draw
from tools.tiny_vision.prompt_files import IMAGE, IMAGE_ID, with_image_token, with_pictures
from tools.tiny_vision.questions import KINDS, Question, listed, place, questions
from tools.tiny_vision.scenes import APART, COLOURS, Scene, Thing, scene

MODEL = EMBEDDED / "quire-tiny"
SMALL = '{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}'  # fmt: skip
SCENE = Scene(
    (
        Thing("red", "circle", 0.2, 0.2, 0.2, 0.2), Thing("blue", "square", 0.5, 0.5, 0.2, 0.2),
        Thing("red", "circle", 0.7, 0.8, 0.2, 0.2), Thing("orange", "42", 0.85, 0.2, 0.2, 0.2),
    ),
    1.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(with_image_token((MODEL / "tokenizer.json").read_text()))


def test_scenes_are_clear_and_split():
    rng = random.Random(4)
    drawn = [scene(rng) for _ in range(200)]
    for one in drawn:
        xs = [thing.x for thing in one.things]
        assert all(b - a >= APART for a, b in pairwise(xs))
        assert not any(a.overlaps(b) for i, a in enumerate(one.things) for b in one.things[:i])
        assert sum(thing.is_number for thing in one.things) <= 1
        assert not one.held_out
    kept = {tuple((t.colour, t.kind) for t in case.scene.things) for case in held_out(60)}
    assert len(kept) > 40
    assert not kept & {tuple((t.colour, t.kind) for t in one.things) for one in drawn}


def test_a_picture_shows_its_scene():
    """The pixel in the middle of a shape has one of its colour's tints; a corner that is free has the ground."""
    rng = random.Random(5)
    for _ in range(60):
        one = scene(rng)
        image = draw(one, rng)
        for thing in one.shapes:
            found = image.getpixel((int(thing.x * image.width), int((thing.y + 0.05 * thing.height) * image.height)))  # fmt: skip
            nearest = min(COLOURS, key=lambda name: min(sum(abs(a - b) for a, b in zip(found, tint, strict=True)) for tint in TINTS[name]))  # fmt: skip
            assert nearest == thing.colour
        assert min(image.getpixel((0, 0))) >= 236


def test_answers():
    rng = random.Random(6)
    assert (
        listed(list(SCENE.things)) == "A red circle, a blue square, a red circle and an orange 42."
    )
    asked = [one for _ in range(300) for one in questions(SCENE, rng, 7)]
    answers = {kind: {(one.text, one.answer) for one in asked if one.kind == kind} for kind in KINDS}  # fmt: skip
    counts = {text.split(" ")[2]: answer for text, answer in answers["count"] if " shapes" not in text}  # fmt: skip
    assert counts == {
        "circles": "There are 2 circles.", "squares": "There is 1 square.", "stars": "There are no stars.", "triangles": "There are no triangles.",
    }  # fmt: skip
    shapes = {answer for text, answer in answers["count"] if " shapes" in text}
    assert {"There are 3 shapes.", "There are 2 red shapes.", "There is 1 blue shape.", "There are no green shapes."} <= shapes  # fmt: skip
    assert {answer for _, answer in answers["colour"]} == {"It is blue.", "It is orange."}
    assert {answer for text, answer in answers["where"] if "blue square" in text} == {"It is in the middle."}  # fmt: skip
    asked_of = {(side, what): answer for text, answer in answers["beside"] for side in ("left", "right") for what in ("square", "42") if side in text and what in text}  # fmt: skip
    assert asked_of == {
        ("left", "square"): "A red circle.", ("right", "square"): "A red circle.",
        ("left", "42"): "A red circle.", ("right", "42"): "Nothing.",
    }  # fmt: skip
    assert not any("circle" in text for text, _ in answers["beside"] | answers["where"])
    assert {answer for _, answer in answers["number"]} == {"The number is 42."}
    assert [place(one) for one in SCENE.things] == ["top left", "middle", "", "top right"]


def test_what_the_tower_is_told(tokenizer: Tokenizer):
    made = labels(SCENE, 8).reshape(8, 8, 3)
    assert SEEN[made[1, 1, 0]] == "circle"
    assert SEEN[made[1, 7, 0]] == "2"
    assert (SEEN[made[4, 0, 0]], made[4, 0, 1], made[4, 0, 2]) == ("nothing", 0, 0)
    assert made[made != -100].max() < max(len(SEEN), COLOUR_CLASSES)
    told = tokenizer.decode(Captions(tokenizer, 64).caption(SCENE).tolist())
    assert told.startswith(" red circle")
    assert " orange 42" in told
    assert "2 cir" in told


@pytest.fixture(scope="module")
def render() -> Callable[..., str]:
    """The published chat template, with pictures."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(with_pictures((MODEL / "chat_template.jinja").read_text()))
    return template.render


def test_the_token_of_a_picture_takes_no_other_place(tokenizer: Tokenizer):
    published = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.id_to_token(IMAGE_ID) == IMAGE
    assert len(tokenizer.get_vocab()) == len(published.get_vocab())
    for text in ("\u00ff \u7530 \U0001f642 What is 3 + 4?", "<|im_start|>user\n<think>"):
        assert tokenizer.encode(text).ids == published.encode(text).ids
        assert IMAGE_ID not in tokenizer.encode(text).ids


def test_prompts_are_those_of_the_template(tokenizer: Tokenizer, render: Callable[..., str]):
    made = Conversations(tokenizer, 1, IMAGE_ID)
    picture = [{"type": "text", "text": "What is it?"}, {"type": "image"}]
    messages = [{"role": "user", "content": picture}, {"role": "assistant", "content": "A."}, {"role": "user", "content": "Why?"}]  # fmt: skip
    first = [*made.ids("<|im_start|>user\n"), IMAGE_ID, *made.asked("What is it?")]
    whole = tokenizer.encode(render(messages=messages[:1], add_generation_prompt=True)).ids
    assert whole == first
    later = first + made.ids("A.<|im_end|>") + made.asked("Why?", again=True)
    assert tokenizer.encode(render(messages=messages, add_generation_prompt=True)).ids == later


def test_conversations_beside_each_other_equal_each_alone(tokenizer: Tokenizer):
    torch.manual_seed(1)
    language = Network(shape_of(MODEL))
    load_weights(language, MODEL)
    sight = Sight(Eyes(), language)
    made = Conversations(tokenizer, 64, IMAGE_ID)
    asked = [Question("count", f"How many {what}s?", "There are 2.") for what in ("red shape", "star", "circle")]  # fmt: skip
    head = made.ids("<|im_start|>user\n")
    whole = made.arranged(head, asked, random.Random(1), 0)
    rows = torch.randn(1, 64, 256)
    with torch.inference_mode():
        together = states(sight, whole, rows)
        for number, one in enumerate(asked, 1):
            alone = states(sight, made.arranged(head, [one], random.Random(1), 0), rows)
            own = np.flatnonzero(whole.parts_T == number)
            torch.testing.assert_close(together[own], alone[len(head) + 64 :], atol=1e-4, rtol=1e-4)


def states(sight: Sight, made: object, rows_BLD: torch.Tensor) -> torch.Tensor:
    arrays = [torch.from_numpy(getattr(made, name))[None] for name in ("tokens_T", "weights_T", "positions_T", "mask_TT")]  # fmt: skip
    return sight.hidden(rows_BLD, Batch(rows_BLD, rows_BLD, rows_BLD, *arrays, rows=made.rows))[0]  # type: ignore[attr-defined]


def test_batches_follow_from_their_seed():
    wanted = Wanted(MODEL / "tokenizer.json", IMAGE_ID, 64, 8, 3, 4)
    one, same, other = batch(wanted, 1), batch(wanted, 1), batch(wanted, 2)
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.pixels_BCHW, other.pixels_BCHW)


def test_train_go_on_and_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def asked(**changes: object) -> Namespace:
        usual = dict(
            run=tmp_path / "run", language=MODEL, shape=SMALL, steps=1, decay=0.4, batch=2, questions=2, answers=0.0, dense=1.0,
            caption=1.0, matrix_rate=0.02, other_rate=2e-3, seed=1, save=100, measure=1, measured=2, threads=1, dtype="float32", text=0,
            factors="{}", warm_up=60,
        )  # fmt: skip
        return Namespace(**usual | changes)

    train.main(asked())
    train.main(asked(steps=2, answers=1.0))
    said = capsys.readouterr().out
    assert "from step 1 to 2" in said
    assert "step 2 held out: describe" in said
    digests = []
    for name in ("one", "two"):
        export.export(tmp_path / "run", MODEL, tmp_path / name)
        digests.append({f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in (tmp_path / name).iterdir()})  # fmt: skip
    assert digests[0] == digests[1]
    assert "in 2 steps" in (tmp_path / "one" / "README.md").read_text()
    assert same_language(tmp_path / "one")
    train.main(asked(steps=3, answers=1.0, text=256))
    export.export(tmp_path / "run", MODEL, tmp_path / "joint", "master")
    assert not same_language(tmp_path / "joint"), "it learns where texts are given"


def same_language(folder: Path) -> bool:
    found = text_weights(folder)
    return all(torch.equal(found[name], weight) for name, weight in text_weights(MODEL).items())
