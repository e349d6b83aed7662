"""The options of `quire bench serve`: names and defaults of `vllm bench serve`.

Knows the options. Does not know how they are used.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench.serve import datasets
from quire.bench.serve.endpoints import KINDS
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


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="quire bench serve",
        usage="%(prog)s [options]",
        description=ABOUT,
        allow_abbrev=False,
    )
    _server_options(found.add_argument_group("server"))
    _prompt_options(found.add_argument_group("prompts"))
    _load_options(found.add_argument_group("load"))
    _result_options(found.add_argument_group("result"))
    group = found.add_argument_group("sampling", "unset: greedy, with the server's defaults")
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind)
    group.add_argument("--logprobs", type=int, metavar="N", help="request N log-probabilities")
    group.add_argument(
        "--extra-body",
        type=_object,
        default={},
        metavar="JSON",
        help="more fields of the request body",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="ignore end-of-text tokens, so that every output has the requested length",
    )
    return found


def _server_options(group: Any) -> None:
    add = group.add_argument
    add("--backend", "--endpoint-type", default="openai", metavar="KIND", help=", ".join(KINDS))
    add("--base-url", metavar="URL", help="instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", metavar="PATH", help="unset: the backend's")
    add("--model", help="unset: the server's first model")
    add("--served-model-name", metavar="NAME", help="model name in requests")
    add(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME",
        help="LoRA adapters; each request uses a random one",
    )
    add("--header", nargs="*", default=[], metavar="NAME=VALUE", help="more request headers")
    add("--api-key", metavar="KEY", help="unset: QUIRE_API_KEY or OPENAI_API_KEY")
    add("--insecure", action="store_true", help="do not verify the TLS certificate")
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=600,
        metavar="S",
        help="seconds to wait for the server; 0: do not wait",
    )


def _prompt_options(group: Any) -> None:
    add = group.add_argument
    add("--dataset-name", default="random", metavar="NAME", help=", ".join(datasets.DATASETS))
    add("--dataset-path", type=Path, metavar="FILE")
    add("--num-prompts", type=int, default=1000, metavar="N")
    add("--tokenizer", metavar="NAME", help="unset: the server's, if its API offers one")
    add("--trust-remote-code", action="store_true")
    add("--seed", type=int, default=0)
    add("--disable-shuffle", action="store_true", help="do not shuffle the prompts of the file")
    add("--random-input-len", "--input-len", type=int, default=1024, metavar="TOKENS")
    add("--random-output-len", "--output-len", type=int, default=128, metavar="TOKENS")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths vary from 1-R to 1+R times the length",
    )
    add(
        "--random-prefix-len",
        type=int,
        default=0,
        metavar="TOKENS",
        help="tokens of a prefix that all prompts share",
    )
    add("--prefix-repetition-prefix-len", type=int, default=256, metavar="TOKENS")
    add("--prefix-repetition-suffix-len", type=int, default=256, metavar="TOKENS")
    add("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N")
    add("--prefix-repetition-output-len", type=int, default=128, metavar="TOKENS")
    add(
        "--custom-output-len",
        type=int,
        default=256,
        metavar="TOKENS",
        help="for prompts without a length in the file",
    )
    add(
        "--sharegpt-output-len",
        type=int,
        metavar="TOKENS",
        help="instead of the lengths in the file",
    )


def _load_options(group: Any) -> None:
    add = group.add_argument
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="RPS",
        help="requests per second; inf: all at once",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="1: Poisson arrivals; below 1: bursts; above 1: more regular",
    )
    add("--max-concurrency", type=int, metavar="N", help="maximum requests in flight")
    add("--ramp-up-strategy", choices=("linear", "exponential"))
    add("--ramp-up-start-rps", type=float, default=0.0, metavar="RPS")
    add("--ramp-up-end-rps", type=float, default=0.0, metavar="RPS")
    add(
        "--num-warmups",
        type=int,
        default=0,
        metavar="N",
        help="warm-up requests that are not measured",
    )
    add(
        "--profile",
        action="store_true",
        help="call /start_profile before and /stop_profile after the run",
    )
    add("--disable-tqdm", action="store_true", help="do not show a progress bar")
    add(
        "--request-id-prefix",
        default="bench-",
        metavar="TEXT",
        help="prefix of the header X-Request-Id",
    )


def _result_options(group: Any) -> None:
    add = group.add_argument
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help="of ttft,tpot,itl,e2el",
    )
    add("--metric-percentiles", default="99", metavar="NUMBERS", help="such as 50,90,99")
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="latency goals in ms that count a request as good, such as ttft:200",
    )
    add("--save-result", action="store_true", help="write the result as JSON")
    add("--save-detailed", action="store_true", help="include the values of each request")
    add(
        "--append-result",
        action="store_true",
        help="append to the file, one object per line",
    )
    add(
        "--plot-timeline",
        action="store_true",
        help="write an HTML timeline with one bar per request",
    )
    add(
        "--timeline-itl-thresholds", type=_two_numbers, default=GAPS_MS, metavar="MS,MS",
        help="thresholds in ms of its colors",
    )  # fmt: skip
    add("--result-dir", type=Path, default=Path(), metavar="FOLDER")
    add("--result-filename", metavar="NAME")
    add("--label", metavar="TEXT", help="prefix of the file name; unset: the backend")
    add("--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="added to the result file")


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


def dataset_options(given: argparse.Namespace) -> datasets.DatasetOptions:
    """The options of the chosen dataset, by common names."""
    if given.random_input_len < 1 or given.random_output_len < 1:
        raise ConfigError("--random-input-len and --random-output-len: must be at least 1")
    if not 0 <= given.random_range_ratio < 1:
        raise ConfigError(
            f"--random-range-ratio {given.random_range_ratio:g}: must be at least 0 and below 1"
        )
    repeated = given.dataset_name == "prefix_repetition"
    outputs = {
        "prefix_repetition": given.prefix_repetition_output_len,
        "custom": given.custom_output_len,
    }
    return datasets.DatasetOptions(
        given.dataset_name, given.num_prompts, given.seed,
        path=given.dataset_path,
        input_len=given.random_input_len,
        output_len=outputs.get(given.dataset_name, given.random_output_len),
        range_ratio=given.random_range_ratio,
        prefix_len=given.prefix_repetition_prefix_len if repeated else given.random_prefix_len,
        prefixes=given.prefix_repetition_num_prefixes,
        suffix_len=given.prefix_repetition_suffix_len,
        fixed_output=given.sharegpt_output_len if given.dataset_name == "sharegpt" else None,
        shuffle=not given.disable_shuffle,
    )  # fmt: skip
