"""Writes a checkpoint as `load_format=sharded_state` reads it: the tensors of one rank, in files of a limited size.

vLLM's save_sharded_state writes the same files, with the parts of a weight joined (qkv_proj, gate_up_proj); Quire reads both.
"""

from __future__ import annotations

import string
from pathlib import Path

from torch import Tensor

from quire.errors import ConfigError, QuireError
from quire.models.checkpoint_files import tensors

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
MOST_BYTES = 5 << 30


def save_sharded_state(
    source: str, output: str | Path, pattern: str | None = None, max_size: int | None = None,
    load_format: str = "auto",
) -> None:  # fmt: skip
    """Write the tensors of the checkpoint `source` into the directory `output`.

    Args:
        pattern: names of the files, with {part}, and with {rank}, {tp_rank} or {pp_rank}, which are 0.
        max_size: bytes of tensors in a file; None: 5 GiB.

    Raises:
        ConfigError: the pattern is wrong, or the weights are random.
        QuireError: a file of this name exists.
    """
    if load_format == "dummy":
        raise ConfigError("save_sharded_state: load_format=dummy has no checkpoint to save")
    pattern = pattern or PATTERN
    fields = {field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None}
    if "part" not in fields or not fields <= {"part", "rank", "tp_rank", "pp_rank"}:
        raise ConfigError(f"pattern={pattern!r}: must contain {{part}}, and may contain {{rank}}, {{tp_rank}} and {{pp_rank}}")  # fmt: skip
    if Path(pattern).name != pattern:
        raise ConfigError(f"pattern={pattern!r}: must be the name of a file, not a path")
    most = MOST_BYTES if max_size is None else max_size
    part: dict[str, Tensor] = {}
    count = size = 0
    for name, tensor in tensors(source, load_format):
        if part and size + tensor.nbytes > most:
            _write(part, Path(output), pattern, count)
            part, count, size = {}, count + 1, 0
        part[name] = tensor.contiguous()
        size += tensor.nbytes
    _write(part, Path(output), pattern, count)


def _write(part: dict[str, Tensor], output: Path, pattern: str, number: int) -> None:
    from safetensors.torch import save_file

    file = output / pattern.format(rank=0, tp_rank=0, pp_rank=0, part=number)
    if file.exists():
        raise QuireError(f"{file} exists: choose an empty directory")
    save_file(part, file, {"format": "pt"})
