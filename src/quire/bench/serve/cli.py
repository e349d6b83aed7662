"""The options of `quire bench serve`: names and defaults of `vllm bench serve`.

Knows the options. Does not know how they are used.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench import plot
from quire.bench.serve import datasets
from quire.bench.serve.sound import ALL_KINDS, AUDIO
from quire.bench.serve.timeline import GAPS_MS
from quire.errors import ConfigError

ABOUT = """Benchmark a running server that implements the OpenAI API. Exit status 0; 1 if no request succeeded; 2 for a usage
error."""

SAMPLING: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}


def _two_numbers(text: str) -> tuple[float, float]:
    low, high = (float(number) for number in text.split(","))
    if not 0 < low <= high:
        raise argparse.ArgumentTypeError(
            f"{text}: must be two numbers above 0, the smaller one first"
        )
    return low, high


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("must be an object")
    return found


class ServeOption(NamedTuple):
    """An option of `quire bench serve`."""

    flags: str
    kind: Callable[[str], Any] | None  # converts its value; None: it takes no value
    default: Any = None
    metavar: str | None = None
    help: str | None = None
    nargs: str | None = None
    choices: Sequence[str] | None = None

    def add_to(self, group: Any) -> None:
        if self.kind is None:
            group.add_argument(*self.flags.split(), action="store_true", help=self.help)
        else:
            flags, kind, *others = self
            names = self._fields[2:]
            group.add_argument(*flags.split(), type=kind, **dict(zip(names, others, strict=True)))


OPTIONS: dict[str, tuple[ServeOption, ...]] = {
    "server": (
        ServeOption("--backend --endpoint-type", str, "openai", "KIND", ", ".join(ALL_KINDS)),
        ServeOption("--base-url", str, None, "URL", "instead of --host and --port"),
        ServeOption("--host", str, "127.0.0.1"),
        ServeOption("--port", int, 8000),
        ServeOption("--endpoint", str, None, "PATH", "unset: the backend's"),
        ServeOption("--model", str, help="unset: the server's first model"),
        ServeOption("--served-model-name", str, None, "NAME", "model name in requests"),
        ServeOption("--lora-modules", str, [], "NAME", "LoRA adapters; each request uses a random one", "+"),
        ServeOption("--header", str, [], "NAME=VALUE", "more request headers", "*"),
        ServeOption("--api-key", str, None, "KEY", "unset: QUIRE_API_KEY or OPENAI_API_KEY"),
        ServeOption("--insecure", None, help="do not verify the TLS certificate"),
        ServeOption("--ready-check-timeout-sec", float, None, "S", "seconds to wait for the server; 0: do not wait; unset: 600, and 5 while nothing listens"),
    ),
    "prompts": (
        ServeOption("--dataset-name", str, "random", "NAME", ", ".join(datasets.DATASETS)),
        ServeOption("--dataset-path", Path, None, "FILE"),
        ServeOption("--num-prompts", int, 1000, "N"),
        ServeOption("--tokenizer", str, None, "NAME", "unset: the server's, if its API offers one"),
        ServeOption("--trust-remote-code", None),
        ServeOption("--seed", int, 0),
        ServeOption("--disable-shuffle", None, help="do not shuffle the prompts of the file"),
        ServeOption("--random-input-len --input-len", int, 1024, "TOKENS"),
        ServeOption("--random-output-len --output-len", int, 128, "TOKENS"),
        ServeOption("--random-range-ratio", float, 0.0, "R", "lengths vary from 1-R to 1+R times the length"),
        ServeOption("--random-prefix-len", int, 0, "TOKENS", "tokens of a prefix that all prompts share"),
        ServeOption("--random-audio-len", float, 10.0, "S", "seconds of each sound, with --backend openai-audio"),
        ServeOption("--prefix-repetition-prefix-len", int, 256, "TOKENS"),
        ServeOption("--prefix-repetition-suffix-len", int, 256, "TOKENS"),
        ServeOption("--prefix-repetition-num-prefixes", int, 10, "N"),
        ServeOption("--prefix-repetition-output-len", int, 128, "TOKENS"),
        ServeOption("--custom-output-len", int, 256, "TOKENS", "for prompts without a length in the file"),
        ServeOption("--sharegpt-output-len", int, None, "TOKENS", "instead of the lengths in the file"),
    ),
    "load": (
        ServeOption("--request-rate", float, math.inf, "RPS", "requests per second; inf: all at once"),
        ServeOption("--burstiness", float, 1.0, "X", "1: Poisson arrivals; below 1: bursts; above 1: more regular"),
        ServeOption("--max-concurrency", int, None, "N", "maximum requests in flight"),
        ServeOption("--ramp-up-strategy", str, choices=("linear", "exponential")),
        ServeOption("--ramp-up-start-rps", float, 0.0, "RPS"),
        ServeOption("--ramp-up-end-rps", float, 0.0, "RPS"),
        ServeOption("--num-warmups", int, 0, "N", "warm-up requests that are not measured"),
        ServeOption("--profile", None, help="call /start_profile before and /stop_profile after the run"),
        ServeOption("--disable-tqdm", None, help="do not show a progress bar"),
        ServeOption("--request-id-prefix", str, "bench-", "TEXT", "prefix of the header X-Request-Id"),
    ),
    "result": (
        ServeOption("--percentile-metrics", str, "ttft,tpot,itl", "NAMES", "of ttft,tpot,itl,e2el"),
        ServeOption("--metric-percentiles", str, "99", "NUMBERS", "such as 50,90,99"),
        ServeOption("--goodput", str, None, "NAME:MS", "latency goals in ms that count a request as good, such as ttft:200", "+"),
        ServeOption("--hourly-cost", float, None, "PRICE", "price of the server for an hour: adds the cost of a million tokens"),
        ServeOption("--save-result", None, help="write the result as JSON"),
        ServeOption("--save-detailed", None, help="include the values of each request"),
        ServeOption("--append-result", None, help="append to the file, one object per line"),
        ServeOption("--plot", Path, None, "NAME", plot.HELP),
        ServeOption("--plot-timeline", None, help="write an HTML timeline with one bar per request"),
        ServeOption("--timeline-itl-thresholds", _two_numbers, GAPS_MS, "MS,MS", "thresholds in ms of its colors"),
        ServeOption("--result-dir", Path, Path(), "FOLDER"),
        ServeOption("--result-filename", str, None, "NAME"),
        ServeOption("--label", str, None, "TEXT", "prefix of the file name; unset: the backend"),
        ServeOption("--metadata", str, [], "NAME=VALUE", "added to the result file", "*"),
    ),
    "sampling": (
        *(ServeOption(f"--{name.replace('_', '-')}", kind) for name, kind in SAMPLING.items()),
        ServeOption("--logprobs", int, None, "N", "request N log-probabilities"),
        ServeOption("--extra-body", _object, {}, "JSON", "more fields of the request body"),
        ServeOption("--ignore-eos", None, help="ignore end-of-text tokens, so that every output has the requested length"),
    ),
}  # fmt: skip
NOTES = {"sampling": "unset: greedy, with the server's defaults"}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="quire bench serve",
        usage="%(prog)s [options]",
        description=ABOUT,
        allow_abbrev=False,
    )
    for title, options in OPTIONS.items():
        group = found.add_argument_group(title, NOTES.get(title))
        for option in options:
            option.add_to(group)
    return found


def dashed(words: Sequence[str]) -> list[str]:
    """Replace underscores in flags: --num_prompts is --num-prompts, as on all of Quire's command lines."""
    return [word if not word.startswith("--") else _dashed(*word.partition("=")) for word in words]


def _dashed(flag: str, equals: str, value: str) -> str:
    return flag.replace("_", "-") + equals + value


def pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} {word}: must be NAME=VALUE")
        found[name] = value
    return found


def dataset_options(args: argparse.Namespace) -> datasets.DatasetOptions:
    """The options of the chosen dataset, by common names."""
    if args.random_input_len < 1 or args.random_output_len < 1:
        raise ConfigError("--random-input-len and --random-output-len: must be at least 1")
    if not 0 < args.random_audio_len <= 3600:
        raise ConfigError(
            f"--random-audio-len {args.random_audio_len:g}: must be above 0, and 3600 at most"
        )
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(
            f"--random-range-ratio {args.random_range_ratio:g}: must be at least 0 and below 1"
        )
    repeated = args.dataset_name == "prefix_repetition"
    outputs = {
        "prefix_repetition": args.prefix_repetition_output_len,
        "custom": args.custom_output_len,
    }
    return datasets.DatasetOptions(
        args.dataset_name, args.num_prompts, args.seed,
        path=args.dataset_path,
        input_len=args.random_input_len,
        output_len=outputs.get(args.dataset_name, args.random_output_len),
        range_ratio=args.random_range_ratio,
        prefix_len=args.prefix_repetition_prefix_len if repeated else args.random_prefix_len,
        prefixes=args.prefix_repetition_num_prefixes,
        suffix_len=args.prefix_repetition_suffix_len,
        fixed_output=args.sharegpt_output_len if args.dataset_name == "sharegpt" else None,
        shuffle=not args.disable_shuffle,
        # programs that only want prompts have a parser without --backend
        sound_s=args.random_audio_len if getattr(args, "backend", None) == AUDIO else 0.0,
    )  # fmt: skip
