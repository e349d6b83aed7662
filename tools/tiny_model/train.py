"""Trains quire-tiny, or goes on training it.

    python -m tools.tiny_model.train RUN --tokenizer DIR --steps 6000          a new run, or the next part of RUN
    python -m tools.tiny_model.train RUN --from src/quire/embedded/quire-tiny  from published weights

RUN/state.pt is written every `--save` steps and on SIGTERM, and read when it is there. The rate warms up, stays, and
falls to nothing over the last part of the steps; a moving average of the weights is kept and is what gets exported.
"""

import argparse
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_model import corpus
from tools.tiny_model.model import Network, Shape
from tools.tiny_model.optimizer import Optimizer
from tools.tiny_model.published import text_config, text_weights
from tools.tiny_model.sample import Sample

WARM_UP = 60


def factor(step: int, steps: int, decay: float, warm_up: int = WARM_UP) -> float:
    """Return the share of the full rate at a step: warm up, stay, and fall in a line over the last `decay` of it."""
    left = (steps - step) / max(1.0, decay * steps)
    return max(0.0, min(1.0, (step + 1) / warm_up, left))


Part = tuple[Tensor, Tensor, Tensor]  # tokens, loss weights, document numbers, each [B, T]


class Batches:
    """Yields batches of about so many tokens, in parts of documents of like length."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        tokens: int,
        device: str,
        change: Callable[[Sample], Sample] = lambda sample: sample,
        factors: Mapping[str, float] | None = None,
        spread: float = 1.3,
    ) -> None:
        self.device = device
        self.drawn = corpus.batches(tokenizer, seed, tokens, change, factors, spread)

    def take(self) -> list[Part]:
        """Return the parts of the next batch."""
        made = []
        for arrays in next(self.drawn):
            tokens, weights, documents = (torch.from_numpy(a).to(self.device) for a in arrays)
            made.append((tokens, weights, documents))
        return made


def learn(network: Network, parts: list[Part]) -> float:
    """Add the gradients of a batch, a part at a time; return its loss."""
    whole = sum(float(weights[:, 1:].sum()) for _, weights, _ in parts)
    total = 0.0
    for tokens, weights, documents in parts:
        loss = network.loss(tokens, weights, documents) * (float(weights[:, 1:].sum()) / whole)
        loss.backward()
        total += float(loss.detach())
    return total


def shape_of(folder: Path) -> Shape:
    """Return the shape that a config.json states."""
    config = text_config(folder)
    return Shape(**{f.name: config[f.name] for f in dataclasses.fields(Shape) if f.name in config})


def load_weights(network: Network, folder: Path) -> None:
    """Read published weights into the network."""
    weights = text_weights(folder)
    network.load_state_dict({name: w.float() for name, w in weights.items()}, strict=True)


def save(run: Path, shape: Shape, optimizer: Optimizer, seen: int) -> None:
    """Write the state so that a kill at any moment leaves a whole file."""
    torch.save(
        {"shape": dataclasses.asdict(shape), "optimizer": optimizer.state(), "tokens": seen},
        run / "state.tmp",
    )
    (run / "state.tmp").replace(run / "state.pt")


def main(asked: argparse.Namespace) -> None:
    """Run until `--steps` are done."""
    torch.set_num_threads(asked.threads)
    torch.manual_seed(asked.seed)
    run: Path = asked.run
    run.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {}
    if (run / "state.pt").exists():
        state = torch.load(run / "state.pt", weights_only=True)
    if state:
        shape = Shape(**state["shape"])
    elif asked.start:
        shape = shape_of(asked.start)
    else:
        shape = Shape(**json.loads(asked.shape))
    network = Network(shape)
    if asked.start and not state:
        load_weights(network, asked.start)
    network = network.to(asked.device, getattr(torch, asked.dtype))
    optimizer = Optimizer(network, asked.matrix_rate, asked.other_rate)
    seen = 0
    if state:
        optimizer.restore(state["optimizer"])
        seen = state["tokens"]
    tokenizer = Tokenizer.from_file(str((asked.tokenizer or asked.start) / "tokenizer.json"))
    # A run that goes on must not see the same text again: the seed moves with the step.
    batches = Batches(
        tokenizer,
        asked.seed * 1_000_003 + optimizer.steps,
        asked.batch,
        asked.device,
        factors=json.loads(asked.factors),
    )
    count = sum(p.numel() for p in network.parameters())
    print(f"{count} parameters, from step {optimizer.steps} to {asked.steps}", flush=True)
    loop(asked, network, optimizer, batches, seen)


def loop(
    asked: argparse.Namespace, network: Network, optimizer: Optimizer, batches: Batches, seen: int
) -> None:
    """Take the steps, print a line now and then, save now and then."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    began, total, many = time.time(), 0.0, 0
    while optimizer.steps < asked.steps and not stop:
        parts = batches.take()
        total, many = total + learn(network, parts), many + 1
        optimizer.step(factor(optimizer.steps, asked.steps, asked.decay))
        seen += sum(int((documents >= 0).sum()) for _, _, documents in parts)
        if optimizer.steps % 10 == 0:
            pace = many * asked.batch / (time.time() - began)
            rate = factor(optimizer.steps, asked.steps, asked.decay)
            print(
                f"step {optimizer.steps} tokens {seen / 1e6:.2f}M loss {total / many:.4f} "
                f"rate {rate:.2f} {pace:.0f} tok/s",
                flush=True,
            )
            began, total, many = time.time(), 0.0, 0
        if optimizer.steps % asked.save == 0:
            save(asked.run, network.shape, optimizer, seen)
    save(asked.run, network.shape, optimizer, seen)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--from", dest="start", type=Path)
    parser.add_argument("--shape", default="{}", help="JSON: what differs from the default Shape")
    parser.add_argument("--factors", default="{}", help="JSON: family to a factor of its share")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument(
        "--decay", type=float, default=0.3, help="share of the steps in which the rate falls"
    )
    parser.add_argument("--batch", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtype", default="bfloat16", help="float32 where the machine has no fast bfloat16"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
