"""ProfilerOptions: the keys of `profiler_config`, and what one recording may be.

Knows vLLM's names of the keys. Does not know torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert

from quire.errors import ConfigError, Unsupported
from quire.errors import ValidationError as Invalid

MOST_STEPS = 10_000
PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
WITHOUT_EFFECT = ("ignore_frontend", "torch_profiler_dump_cuda_time_total", "detailed_trace_annotation")  # fmt: skip


class ProfilerOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_iterations` 0: 1,000 steps."""

    profiler: str | None = None
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = False
    torch_profiler_with_flops: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_use_gzip: bool = True
    delay_iterations: int = 0
    max_iterations: int = 0


def profiler_options(json_object: Mapping[str, Any]) -> ProfilerOptions:
    """Parse `profiler_config`.

    Raises:
        ConfigError: an unknown key, or an invalid value. Unsupported: another profiler than torch's.
    """
    given = {key: value for key, value in json_object.items() if value is not None and key not in WITHOUT_EFFECT}  # fmt: skip
    try:
        options = convert(given, ProfilerOptions)
    except ValidationError as error:
        raise ConfigError(f"profiler_config: {error}") from error
    if options.profiler not in (None, "torch"):
        raise Unsupported(f"profiler_config.profiler={options.profiler!r}", "use torch")
    if options.profiler is not None and not Path(options.torch_profiler_dir).is_absolute():
        raise ConfigError("profiler_config.torch_profiler_dir: must be the absolute path of a folder for traces")  # fmt: skip
    for name in ("delay_iterations", "max_iterations"):
        if not 0 <= getattr(options, name) <= MOST_STEPS:
            raise ConfigError(f"profiler_config.{name}: must be from 0 to {MOST_STEPS}")
    return options


def check_recording(prefix: str | None, delay: int | None, steps: int | None) -> None:
    """Raises ValidationError that names what is wrong with a client's values."""
    if prefix is not None and not PREFIX.fullmatch(prefix):
        raise Invalid("profile_prefix must be 1 to 128 letters, digits or . _ -, and begin with a letter or a digit", parameter="profile_prefix")  # fmt: skip
    for name, value in (("delay_iterations", delay), ("max_iterations", steps)):
        if value is not None and not 0 <= value <= MOST_STEPS:
            raise Invalid(f"{name} must be from 0 to {MOST_STEPS}", parameter=name, value=value)
