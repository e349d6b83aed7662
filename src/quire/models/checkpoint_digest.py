"""A digest of a checkpoint, by which two machines compare theirs in a fraction of a second.

Knows files. It reads sizes, config.json and samples of the weights: two checkpoints of one architecture differ in them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.models.checkpoint_files import weight_files

SAMPLES = 32
"""Of each weight file, beside its first bytes, where safetensors and GGUF files list their tensors."""
SAMPLE_BYTES = 1 << 14
DIGITS = 16


def checkpoint_digest(path: str, load_format: str = "auto") -> str:
    """Equal on two machines if their directories have the same config.json and, as far as sampled, the same weights.

    Raises: as `weight_files`.
    """
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    config = Path(path) / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    files = [] if load_format == "dummy" else weight_files(path, load_format)[1]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for sample in range(SAMPLES + 1):
                opened.seek(max(size - SAMPLE_BYTES, 0) * sample // SAMPLES)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
