"""Writes a checkpoint in the format that `--load-format sharded_state` reads: files of one rank, of a limited size.

    python -m tools.save_sharded_state MODEL OUTPUT [--max-file-size BYTES]

MODEL is a directory, an embedded model or a hub id. OUTPUT gets its other files too. vLLM's save_sharded_state writes the same
files, with the parts of a weight joined (qkv_proj, gate_up_proj); Quire reads both.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.models.checkpoint_locator import WANTED_FILES, locate
from quire.models.sharded_state import MOST_BYTES, save_sharded_state


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint as sharded_state.")
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-file-size", type=int, default=MOST_BYTES, metavar="BYTES")
    asked = parser.parse_args(arguments)
    source = Path(locate(ModelConfig(model=asked.model), LoadConfig()))
    asked.output.mkdir(parents=True, exist_ok=True)
    for pattern in WANTED_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, asked.output / file.name)
    save_sharded_state(str(source), asked.output, max_size=asked.max_file_size)


if __name__ == "__main__":
    main()
