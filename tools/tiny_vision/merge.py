"""Puts the tower of one run and the language model of another into a third, which goes on with both.

    python -m tools.tiny_vision.merge START TOWER_RUN LANGUAGE_RUN RUN

Both began from the state of the run START: one with `--kept`, so that its rows stay readable, the other with `--reading`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

LANGUAGE = "language."


def merged(
    start: dict[str, Any], tower: dict[str, Any], language: dict[str, Any]
) -> dict[str, Any]:
    """A state of `train`, with the steps and pictures of both parts."""
    own, other = tower["optimizer"], language["optimizer"]
    optimizer = {
        name: {**value, **{key: t for key, t in other[name].items() if key.startswith(LANGUAGE)}}
        for name, value in own.items()
        if isinstance(value, dict)
    }
    optimizer["steps"] = own["steps"] + other["steps"] - start["optimizer"]["steps"]
    pictures = tower["pictures"] + language["pictures"] - start["pictures"]
    return {**tower, "optimizer": optimizer, "pictures": pictures}


def main(start: Path, tower: Path, language: Path, run: Path) -> None:
    states = [torch.load(one / "state.pt", weights_only=True) for one in (start, tower, language)]
    run.mkdir(parents=True)
    torch.save(merged(*states), run / "state.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
