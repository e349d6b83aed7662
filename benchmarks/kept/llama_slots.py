"""llama.cpp's first token of a prompt that it saved in a slot's file, after a restart."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks import shapes
from benchmarks.peers.run import ENGINES, PATIENCE_S, asked_of, model_of, started

ENGINE = ENGINES["llama-cpp"]


class LlamaSlots:
    """Starts a new llama.cpp process for each measurement. All these processes write and read the slots of one folder.

    Args:
        given: shape, cache and peers of the command.
        length: tokens of the prompt.

    Methods raise StartupError if llama.cpp is not installed, or ended.
    """

    def __init__(self, given: argparse.Namespace, folder: Path, length: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.given = argparse.Namespace(
            **vars(given),
            scripts=Path("benchmarks/peers"),
            kv_gib=None,
            threads=os.cpu_count(),
            patience=PATIENCE_S,
        )
        shape = shapes.SHAPES[given.shape]
        workload = shapes.Workload(1, length, 1)
        self.asked = asked_of(
            ENGINE, model_of(ENGINE, shape, self.given), shape, [workload], self.given
        )
        self.asked |= {"script": "run_llama_slots.py", "options": {"folder": str(folder)}}

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds of a new engine, and the token. The slot's file is read from the disk, as Quire's folder is, not from the system's cache."""
        for file in self.folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with started("llama.cpp with slots", self.asked, self.given) as engine:
            answer = engine.ask([prompt], 1)
        return answer["seconds"], answer["tokens"][0][0]
