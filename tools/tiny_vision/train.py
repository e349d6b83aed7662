"""Trains the vision tower of quire-tiny; with `--text`, its language model too.

    python -m tools.tiny_vision.train RUN --steps 1500 --answers 0        the tower alone: what is in each patch, and captions
    python -m tools.tiny_vision.train RUN --steps 4000                    goes on, with questions that quire-tiny answers

`torchrun --nproc-per-node 2 -m tools.tiny_vision.train ...` starts two processes, each on its own core. Both draw pictures and compute gradients
for each step, and the step uses the mean of the gradients.

RUN/state.pt is written every `--save` steps and on SIGTERM, and read when it is there. A moving average of the weights is kept,
measured on held-out scenes every `--measure` steps, and exported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_model.model import Network
from tools.tiny_model.optimizer import Optimizer
from tools.tiny_model.train import WARM_UP, Batches, learn, load_weights, shape_of
from tools.tiny_vision.accuracy import accuracy, held_out
from tools.tiny_vision.batches import Arrays, Wanted, batches
from tools.tiny_vision.dense import Captions
from tools.tiny_vision.network import Batch, Eyes, Sight, Weights
from tools.tiny_vision.prompt_files import IMAGE_ID
from tools.tiny_vision.workers import Workers

FRESH = 500_009  # between the seeds of two processes of a run


class Learnt(nn.Module):
    """The parts of a Sight that are trained."""

    def __init__(self, sight: Sight, relations: bool = False) -> None:
        super().__init__()
        if relations:
            self.relations = sight.relations
        if not sight.reading:
            self.tower, self.projector, self.helpers = sight.tower, sight.projector, sight.helpers
        if next(sight.language.parameters()).requires_grad:
            self.language = sight.language


class Texts:
    """The texts that the language model was trained on, so that it forgets none of them."""

    def __init__(self, asked: argparse.Namespace, first: int) -> None:
        tokenizer = Tokenizer.from_file(str(asked.language / "tokenizer.json"))
        seed = asked.seed * 1_000_033 + first
        factors = json.loads(asked.factors)
        self.drawn = Batches(tokenizer, seed, asked.text, "cpu", factors=factors, spread=2.0)

    def learn(self, language: Network) -> float:
        """Add the gradients of a batch; return its loss."""
        return learn(language, self.drawn.take())


def tensors(arrays: Arrays, dtype: torch.dtype) -> Batch:
    made = [torch.from_numpy(array) for array in arrays[:-1]]
    return Batch(made[0].to(dtype), *made[1:], rows=arrays.rows)


def with_new_parts(saved: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A saved state, with what it lacks of parts that are trained from now on."""
    return {name: {**new[name], **value} if isinstance(value, dict) else value for name, value in saved.items()}  # fmt: skip


def save(run: Path, eyes: Eyes, optimizer: Optimizer, pictures: int) -> None:
    """Write the state so that a kill at any moment leaves a whole file."""
    state = {"eyes": dataclasses.asdict(eyes), "optimizer": optimizer.state(), "pictures": pictures}
    torch.save(state, run / "state.tmp")
    (run / "state.tmp").replace(run / "state.pt")


def main(asked: argparse.Namespace) -> None:
    """Run until `--steps` or `--minutes` are over."""
    torch.set_num_threads(asked.threads)
    torch.manual_seed(asked.seed)
    run: Path = asked.run
    run.mkdir(parents=True, exist_ok=True)
    workers = Workers()
    state: dict[str, Any] = {}
    if (run / "state.pt").exists():
        state = torch.load(run / "state.pt", weights_only=True)
    eyes = Eyes(**(state["eyes"] if state else json.loads(asked.shape)))
    dtype = getattr(torch, asked.dtype)
    language = Network(shape_of(asked.language))
    load_weights(language, asked.language)
    tokenizer = Tokenizer.from_file(str(asked.language / "tokenizer.json"))
    word_weights = torch.from_numpy(Captions(tokenizer, eyes.rows).weights())
    sight = Sight(eyes, language, asked.text > 0, word_weights).to(dtype)
    sight.reading = asked.reading
    if state:
        sight.load_state_dict(state["optimizer"]["master"], strict=False)
    if asked.kept:
        sight.remember()
    if asked.compile:
        compile_layers(sight)
    optimizer = Optimizer(Learnt(sight, asked.relations > 0), asked.matrix_rate, asked.other_rate)
    if state:
        optimizer.restore(with_new_parts(state["optimizer"], optimizer.state()))
    patches = eyes.image_size // eyes.patch_size
    wanted = Wanted(
        asked.language / "tokenizer.json", IMAGE_ID, eyes.image_size, patches, asked.batch,
        asked.questions if asked.answers else 0, asked.numbers, asked.room,
    )  # fmt: skip
    count = sum(p.numel() for part in (sight.tower, sight.projector) for p in part.parameters())
    print(f"{count} parameters, from step {optimizer.steps} to {asked.steps}", flush=True)
    loop(asked, sight, optimizer, wanted, workers, state.get("pictures", 0))


def compile_layers(sight: Sight) -> None:
    """Compile each layer of the language model, so that torch fuses its operations between matrix products. The layers of the tower have small
    states, and gain nothing."""
    for layer in sight.language.model.layers:
        layer.compile(dynamic=True)


class Log:
    """Prints the means of the losses and the pace every 20 steps."""

    def __init__(self) -> None:
        self.began, self.losses = time.time(), list[list[float]]()

    def add(self, losses: list[float], step: int, pictures: int, rate: float, batch: int) -> None:
        self.losses.append(losses)
        if step % 20:
            return
        means = zip((*Weights._fields, "text"), (sum(one) / len(self.losses) for one in zip(*self.losses, strict=True)), strict=True)  # fmt: skip
        said = " ".join(f"{name} {mean:.4f}" for name, mean in means if mean)
        pace = len(self.losses) * batch / (time.time() - self.began)
        print(f"step {step} pictures {pictures} {said} rate {rate:.2f} {pace:.1f}/s", flush=True)
        self.began, self.losses = time.time(), []


def loop(
    asked: argparse.Namespace, sight: Sight, optimizer: Optimizer, wanted: Wanted, workers: Workers, seen: int
) -> None:  # fmt: skip
    """Take the steps; print, measure and save now and then."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    dtype, first, began, log = next(sight.parameters()).dtype, optimizer.steps, time.time(), Log()
    # A run that goes on must not see the same pictures again: the seed moves with the step.
    fresh = first + FRESH * workers.rank
    drawn = batches(wanted, asked.seed * 1_000_003 + fresh)
    texts = Texts(asked, fresh) if asked.text else None
    weights = Weights(asked.answers, asked.dense, asked.caption, asked.kept, asked.relations)
    while True:
        done = (optimizer.steps - first) / max(1, asked.steps - first)
        if asked.minutes:
            done = (time.time() - began) / 60 / asked.minutes
        done, stopped = workers.most(done, float(bool(stop)))
        if done >= 1 or stopped:
            break
        total, found = sight.losses(tensors(next(drawn), dtype), weights)
        total.backward()
        losses = [float(one.detach()) for one in found]
        losses.append(texts.learn(sight.language) if texts else 0.0)
        rate = min(1.0, (optimizer.steps - first + 1) / asked.warm_up, (1 - done) / asked.decay)
        workers.average(optimizer.parameters.values())
        optimizer.step(rate)
        seen += wanted.pictures * workers.many
        if workers.rank == 0:
            log.add(losses, optimizer.steps, seen, rate, wanted.pictures * workers.many)
            if optimizer.steps % asked.save == 0:
                save(asked.run, sight.eyes, optimizer, seen)
            if optimizer.steps % asked.measure == 0 and asked.answers:
                measure(sight, optimizer, wanted, asked.measured)
    if workers.rank == 0:
        save(asked.run, sight.eyes, optimizer, seen)


def measure(sight: Sight, optimizer: Optimizer, wanted: Wanted, scenes: int) -> None:
    """Print the share of right answers of the averaged weights, by kind."""
    with torch.no_grad():
        for name, parameter in optimizer.parameters.items():
            parameter.copy_(optimizer.average[name])
        print(f"step {optimizer.steps} held out: {accuracy(sight, wanted, held_out(scenes))}", flush=True)  # fmt: skip
        for name, parameter in optimizer.parameters.items():
            parameter.copy_(optimizer.master[name])


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("run", type=Path)
    parser.add_argument("--language", type=Path, default=EMBEDDED / "quire-tiny")
    parser.add_argument("--shape", default="{}", help="JSON: what differs from the published tower")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=0.0, help="instead of --steps: the rate falls to nothing by then, on a machine of any load")  # fmt: skip
    parser.add_argument("--decay", type=float, default=0.4, help="share of the steps in which the rate falls")  # fmt: skip
    parser.add_argument(
        "--warm-up", type=int, default=WARM_UP, help="steps; fewer where a run goes on"
    )
    parser.add_argument("--batch", type=int, default=48, help="pictures in a step")
    parser.add_argument("--questions", type=int, default=4, help="of a picture")
    parser.add_argument("--room", type=int, help="tokens of a picture's questions, of which --questions are offered; the default: all of them")  # fmt: skip
    parser.add_argument("--text", type=int, default=0, help="tokens of texts in a step, and the language model learns; 0: it does not change")  # fmt: skip
    parser.add_argument(
        "--factors", default="{}", help="JSON: family of texts to a factor of its share"
    )
    parser.add_argument("--answers", type=float, default=1.0, help="weight of the loss of answers")
    parser.add_argument("--dense", type=float, default=0.3, help="weight of the loss of patches")
    parser.add_argument("--caption", type=float, default=0.3, help="weight of the loss of captions")
    parser.add_argument("--kept", type=float, default=0.0, help="weight of staying near the rows of the run's start, where they say their words")  # fmt: skip
    parser.add_argument("--relations", type=float, default=0.0, help="weight of the loss of what rows hold beside their words")  # fmt: skip
    parser.add_argument("--reading", action="store_true", help="the language model learns alone, from rows that say their words")  # fmt: skip
    parser.add_argument("--numbers", type=float, default=0.0, help="share of the pictures in which most things are numbers")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="the layers, with a C++ compiler: a minute at the start")  # fmt: skip
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=int, default=100)
    parser.add_argument("--measure", type=int, default=250)
    parser.add_argument("--measured", type=int, default=60, help="held-out scenes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", help="float32 where the machine has no fast bfloat16")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
