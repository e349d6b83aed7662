"""Command lines of benchmarks that start an engine themselves: own options, and every flag of the engine.

Knows how to parse both together. Does not know what is measured.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import flags, from_keywords
from quire.errors import ConfigError, QuireError


@dataclass(frozen=True, slots=True)
class BenchOption:
    """An option of a benchmark."""

    default: Any
    help: str
    kind: Callable[[str], Any] = int


@dataclass(frozen=True, slots=True)
class BenchArgs:
    own: dict[str, Any]
    engine: dict[str, Any]
    """Keyword arguments for the engine, as given."""


def parse_args(
    command: str, about: str, own: Mapping[str, BenchOption], argv: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
) -> BenchArgs:  # fmt: skip
    """Parse the command line. Ends the program on --help (0) and on a usage error (2).

    Args:
        command: the whole command, such as "quire bench latency".
        defaults: default engine keywords.
    """
    parser = flags.make_parser(command)
    if any(word in ("-h", "--help") for word in argv):
        print(_help(command, about, own), end="")
        parser.exit(0)
    for name, option in own.items():
        dashed = f"--{name.replace('_', '-')}"
        if option.kind is bool:
            parser.add_argument(dashed, action="store_true")
        else:
            parser.add_argument(dashed, type=option.kind)
    try:
        given = flags.keywords(argv, parser)
        mine = {name: given.pop(name, option.default) for name, option in own.items()}
        for name, value in mine.items():
            if type(value) is int and value < (0 if "warmup" in name else 1):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        engine = {"log_level": "WARNING", "disable_log_stats": True, **(defaults or {}), **given}
        from_keywords.engine_config(engine, "flag")  # reports mistakes before anything starts
    except (QuireError, TypeError, ValueError) as why:
        parser.error(str(why))
    return BenchArgs(mine, engine)


def _help(command: str, about: str, own: Mapping[str, BenchOption]) -> str:
    lines = [f"usage: {command} [MODEL] [options]", "", about, ""]
    for name, option in own.items():
        said = f" (unset: {option.default})" if option.default not in (None, False) else ""
        value = "" if option.kind is bool else " X"
        lines.append(f"--{name.replace('_', '-') + value:<24} {option.help}{said}")
    return "\n".join(
        [*lines, "", "All engine flags are accepted too: see quire serve --help=all.", ""]
    )


def start(keywords: Mapping[str, Any]) -> Any:
    """Start an LLM with these engine keywords."""
    from quire.api.llm import LLM

    return LLM.from_config(from_keywords.engine_config(keywords, "flag"))


def sampling(own: Mapping[str, Any], max_tokens: int) -> Any:
    """Random sampling of exactly `max_tokens` tokens, with the options `n` and `disable_detokenize`."""
    from quire.protocol.sampling_params import SamplingParams

    return SamplingParams(
        n=own["n"], temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=max_tokens,
        detokenize=not own["disable_detokenize"],
    )  # fmt: skip


def prompts(llm: Any, count: int, length: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Prompts of random tokens, without special ones; no two prompts share a prefix."""
    draw = random.Random(seed)
    tokenizer = llm.get_tokenizer()
    plain = [token for token in range(len(tokenizer)) if token not in tokenizer.special_ids]
    return [{"prompt_token_ids": draw.choices(plain, k=length)} for _ in range(count)]


def keep(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    except OSError as why:
        raise QuireError(f"--output-json {path}: {why}") from why


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The percentiles that vLLM reports."""
    import numpy

    return {str(one): float(numpy.percentile(values, one)) for one in (10, 25, 50, 75, 90, 99)}


def run_command(
    command: str, about: str, own: Mapping[str, BenchOption], argv: Sequence[str],
    measure: Callable[[BenchArgs], int], defaults: Mapping[str, Any] | None = None,
) -> int:  # fmt: skip
    """Parse the command line and measure; returns the exit status. Prints an error as one line.

    Args:
        command: the whole command, such as "quire bench latency".
        defaults: default engine keywords.
    """
    given = parse_args(command, about, own, argv, defaults)
    try:
        return measure(given)
    except QuireError as why:
        print(f"{command}: error: {why}", file=sys.stderr)
        return 1
