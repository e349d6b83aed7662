"""The drawn world and its questions; conversations beside each other equal each alone; a run that stops, goes on, and is published."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
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
from tools.tiny_vision import export, merge, train
from tools.tiny_vision.accuracy import held_out
from tools.tiny_vision.batches import Wanted, batch
from tools.tiny_vision.conversations import Conversations
from tools.tiny_vision.dense import COLOUR_CLASSES, OWN, PLACES, Captions, labels, relations
from tools.tiny_vision.dense import KINDS as SEEN
from tools.tiny_vision.network import Batch, Eyes, Network, Sight
from tools.tiny_vision.pictures import TINTS, draw
from tools.tiny_vision.prompt_files import IMAGE, IMAGE_ID, with_image_token, with_pictures
from tools.tiny_vision.questions import KINDS, Question, listed, place, questions
from tools.tiny_vision.scenes import APART, COLOURS, SHAPES, Scene, Thing, scene

MODEL = EMBEDDED / "quire-tiny"
ROOT = Path(__file__).parents[2]
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
    made = labels(SCENE, 8).reshape(8, 8, 4)
    assert SEEN[made[1, 1, 0]] == "circle"
    assert (SEEN[made[1, 6, 0]], made[1, 6, 3]) == ("4", 1)
    assert (SEEN[made[1, 7, 0]], made[1, 7, 3]) == ("2", 2)
    assert (SEEN[made[4, 0, 0]], made[4, 0, 1], made[4, 0, 2]) == ("nothing", 0, 0)
    assert made[made != -100].max() < max(len(SEEN), COLOUR_CLASSES)
    told = tokenizer.decode(Captions(tokenizer, 64).caption(SCENE).tolist())
    assert told.startswith(" red circle")
    assert " orange 42" in told
    assert "2 cir" in told


def test_what_the_rows_of_a_thing_hold_of_others():
    """The blue square in the middle has a red circle on each side; there are two red shapes and a blue one."""
    told = relations(SCENE)
    of_square = dict(zip(OWN, told[len(OWN) : 2 * len(OWN)], strict=True))
    blue, red = 1 + COLOURS.index("blue"), 1 + COLOURS.index("red")
    circle, square = 1 + SHAPES.index("circle"), 1 + SHAPES.index("square")
    assert of_square == {
        "colour": blue, "kind": square, "place": 1 + PLACES.index("middle"), "left colour": red, "left kind": circle, "right colour": red,
        "right kind": circle,
    }  # fmt: skip
    last = dict(zip(OWN, told[3 * len(OWN) : 4 * len(OWN)], strict=True))
    assert (last["right colour"], last["right kind"]) == (0, 0)
    counts = dict(zip(COLOURS, told[4 * len(OWN) :], strict=True))
    assert counts == {**dict.fromkeys(COLOURS, 0), "red": 2, "blue": 1}


TWO = """
import torch
from tools.tiny_vision.workers import Workers

workers = Workers()
weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
weight.grad = torch.full_like(weight, 1.0 + workers.rank)
workers.average([weight])
print(workers.many, weight.grad.unique().tolist(), workers.most(workers.rank, 3.0 - workers.rank))
"""


@pytest.mark.slow
def test_two_processes_take_the_same_step():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable, "-c", TWO]  # fmt: skip
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert said.stdout.splitlines() == ["2 [1.5] [1.0, 3.0]"] * 2, said.stderr


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
    return sight.hidden(
        rows_BLD, Batch(rows_BLD, rows_BLD, rows_BLD, rows_BLD, *arrays, rows=made.rows)
    )[0]  # type: ignore[attr-defined]


def test_rows_that_do_not_say_their_word_are_corrected(tokenizer: Tokenizer):
    language = Network(shape_of(MODEL))
    load_weights(language, MODEL)
    sight = Sight(Eyes(), language)
    table = language.model.embed_tokens.weight.detach()
    caption = torch.from_numpy(Captions(tokenizer, 64).caption(SCENE))[None]
    rows = 0.5 * table[caption]
    rows[0, 3] = table[7]
    made = sight.corrected(rows, caption)
    assert caption[0, 3] != 7
    torch.testing.assert_close(made[0, 3], table[caption[0, 3]])
    made[0, 3] = rows[0, 3]
    torch.testing.assert_close(made, rows)


def test_batches_with_room_have_little_padding():
    wanted = Wanted(MODEL / "tokenizer.json", IMAGE_ID, 64, 8, 6, 14, numbers=1.0, room=200)
    made = batch(wanted, 3)
    length = made.rows + 64 + 200
    assert made.tokens_BT.shape == (6, length)
    assert made.mask_BTT.shape == (6, length, length)
    used = made.mask_BTT.sum(-1)[:, -60]
    assert (used > 64).all(), "the last question begins before the last 60 places"
    assert len({int(label) for label in made.labels_BLN[..., 0].flatten() if label > 4}) > 4


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
            factors="{}", warm_up=60, kept=0.0, relations=0.0, reading=False, minutes=0.0, numbers=0.0, room=None, compile=False,
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
    two_parts(tmp_path, asked)


def two_parts(folder: Path, asked: Callable[..., Namespace]) -> None:
    """A tower that learns more digits and a language model that learns to read, each from the same run, go on together."""
    before = weights_of(folder / "run")
    for name, changes in {
        "tower": dict(answers=0.0, kept=1.0, relations=1.0, numbers=1.0, caption=1.0, dense=1.0),
        "language": dict(answers=1.0, text=256, reading=True, questions=6, room=160, caption=0.0, dense=0.0),
    }.items():  # fmt: skip
        shutil.copytree(folder / "run", folder / name)
        train.main(asked(run=folder / name, steps=4, decay=0.1, **changes))
    merge.main(folder / "run", folder / "tower", folder / "language", folder / "both")
    tower, language, both = (weights_of(folder / name) for name in ("tower", "language", "both"))
    for name, weight in before.items():
        reads = name.startswith("language.")
        assert torch.equal(both[name], (language if reads else tower)[name])
        assert torch.equal(weight, (tower if reads else language)[name]), "each learns its own part"
        assert weight.ndim < 2 or not torch.equal(weight, both[name])
    state = torch.load(folder / "both" / "state.pt", weights_only=True)
    assert (state["optimizer"]["steps"], state["pictures"]) == (5, 10), (
        "3 steps of both, and one of each"
    )
    train.main(asked(run=folder / "both", steps=6, answers=1.0, text=256, caption=0.1, dense=0.1))
    assert torch.load(folder / "both" / "state.pt", weights_only=True)["optimizer"]["steps"] == 6


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "state.pt", weights_only=True)["optimizer"]["master"]


def same_language(folder: Path) -> bool:
    found = text_weights(folder)
    return all(torch.equal(found[name], weight) for name, weight in text_weights(MODEL).items())
