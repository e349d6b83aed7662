"""Writes a checkpoint in the format that `--load-format sharded_state` reads: files of one rank, of a limited size.

    python -m tools.save_sharded_state MODEL OUTPUT [--max-file-size BYTES]

MODEL is a directory, an embedded model or a hub id. OUTPUT gets its other files too. vLLM's save_sharded_state writes the same
files, with the parts of a weight joined (qkv_proj, gate_up_proj); Quire reads both.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.models.checkpoint_files import tensors
from quire.models.location import WANTED_FILES, locate

MOST = 5 << 30


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint as sharded_state.")
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-file-size", type=int, default=MOST, metavar="BYTES")
    asked = parser.parse_args(arguments)
    source = Path(locate(ModelConfig(model=asked.model), LoadConfig()))
    asked.output.mkdir(parents=True, exist_ok=True)
    for pattern in WANTED_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, asked.output / file.name)
    part: dict[str, Tensor] = {}
    count = size = 0
    for name, tensor in tensors(str(source)):
        if part and size + tensor.nbytes > asked.max_file_size:
            write(part, asked.output, count)
            part, count, size = {}, count + 1, 0
        part[name] = tensor.contiguous()
        size += tensor.nbytes
    write(part, asked.output, count)


def write(part: dict[str, Tensor], output: Path, number: int) -> None:
    save_file(part, output / f"model-rank-0-part-{number}.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
