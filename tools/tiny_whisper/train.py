"""Trains quire-tiny-whisper on synthesized phrases.

    python -m tools.tiny_whisper.train RUN --phrases DIR --steps 4000      a new run, or the next part of RUN

RUN/state.pt is written every `--save` steps and on SIGTERM, and read when it is there. A moving average of the weights is kept,
measured with `--held-out` every `--measure` steps, and exported.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_model.optimizer import Optimizer
from tools.tiny_model.train import factor
from tools.tiny_whisper import tokenizer as vocabulary
from tools.tiny_whisper.accuracy import Accuracy, greedy_texts
from tools.tiny_whisper.network import SHAPE, Network, config
from tools.tiny_whisper.spectrogram import masked, spectrograms
from tools.tiny_whisper.synthesize import read
from tools.tiny_whisper.windows import SAMPLES, Window, Windows


def learn(network: Network, windows: list[Window], end: int, generator: torch.Generator) -> list[float]:  # fmt: skip
    """Add the gradients of a batch; return its losses."""
    mel_BMF = masked(spectrograms([one.samples_N for one in windows], SAMPLES), generator)
    losses = network.losses(mel_BMF, windows, end)
    losses.total.backward()
    return [float(one.detach()) for one in losses]


def measure(network: Network, average: dict[str, Tensor], windows: list[Window], tokenizer: Tokenizer) -> Accuracy:  # fmt: skip
    """The accuracy of the averaged weights."""
    kept = {name: p.detach().clone() for name, p in network.named_parameters()}
    with torch.no_grad():
        for name, p in network.named_parameters():
            p.copy_(average[name])
        found = Accuracy()
        texts = greedy_texts(network.whisper, tokenizer, [one.samples_N for one in windows])
        for window, text in zip(windows, texts, strict=True):
            found.add(window.text, text)
        for name, p in network.named_parameters():
            p.copy_(kept[name])
    return found


def save(run: Path, shape: dict[str, int], optimizer: Optimizer, windows: int) -> None:
    """Write the state so that a kill at any moment leaves a whole file."""
    torch.save({"shape": shape, "optimizer": optimizer.state(), "windows": windows}, run / "state.tmp")  # fmt: skip
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
    shape = state["shape"] if state else {**SHAPE, **json.loads(asked.shape)}
    tokenizer = vocabulary.train()
    network = Network(config(tokenizer, shape)).to(getattr(torch, asked.dtype))
    optimizer = Optimizer(network, asked.matrix_rate, asked.other_rate)
    if state:
        optimizer.restore(state["optimizer"])
    # A run that goes on must not see the same windows again: the seed moves with the step.
    windows = Windows(read(asked.phrases), tokenizer, asked.seed * 1_000_003 + optimizer.steps)
    others = read(asked.held_out)[: asked.measured] if asked.held_out else []
    drawn = Windows(others, tokenizer, 5, held_out=True)
    held_out = [drawn.window([one]) for one in others]
    count = sum(p.numel() for p in network.whisper.parameters())
    print(f"{count} parameters, from step {optimizer.steps} to {asked.steps}", flush=True)
    loop(asked, network, optimizer, windows, held_out, state.get("windows", 0), shape)


def loop(
    asked: argparse.Namespace, network: Network, optimizer: Optimizer, windows: Windows, held_out: list[Window], seen: int,
    shape: dict[str, int],
) -> None:  # fmt: skip
    """Take the steps; print, measure and save now and then."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    generator = torch.Generator().manual_seed(asked.seed + optimizer.steps)
    end = windows.id[vocabulary.END]
    began, losses = time.time(), []
    while optimizer.steps < asked.steps and not stop:
        batch = [windows.take() for _ in range(asked.batch)]
        losses.append(learn(network, batch, end, generator))
        optimizer.step(factor(optimizer.steps, asked.steps, asked.decay))
        seen += len(batch)
        if optimizer.steps % 20 == 0:
            words, phonemes, places = (sum(one) / len(losses) for one in zip(*losses, strict=True))
            pace = len(losses) * asked.batch / (time.time() - began)
            rate = factor(optimizer.steps, asked.steps, asked.decay)
            print(
                f"step {optimizer.steps} windows {seen} tokens {words:.3f} phonemes {phonemes:.3f} places {places:.3f}"
                f" rate {rate:.2f} {pace:.1f}/s",
                flush=True,
            )
            began, losses = time.time(), []
        if optimizer.steps % asked.save == 0:
            save(asked.run, shape, optimizer, seen)
        if held_out and optimizer.steps % asked.measure == 0:
            found = measure(network, optimizer.average, held_out, windows.tokenizer)
            print(f"step {optimizer.steps} held out: {found}", flush=True)
    save(asked.run, shape, optimizer, seen)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("run", type=Path)
    parser.add_argument("--phrases", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, help="phrases to measure with")
    parser.add_argument("--measured", type=int, default=150, help="how many of them")
    parser.add_argument("--shape", default="{}", help="JSON: what differs from the published shape")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--decay", type=float, default=0.4, help="share of the steps in which the rate falls")  # fmt: skip
    parser.add_argument("--batch", type=int, default=16, help="windows in a step")
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=int, default=100)
    parser.add_argument("--measure", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", help="float32 where the machine has no fast bfloat16")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
