"""`quire bench serve`: load a running server and say how fast it answers.

Any server that speaks OpenAI's protocol. Options, printout and the keys of the result file are those of
`vllm bench serve`. Status 0; 1 if no request was answered; 2 for a mistake in the options.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import env
from quire.bench import datasets, figures
from quire.bench.asking import KINDS, Done, Kind, Prompt, ask
from quire.bench.http import HttpFailed, Server
from quire.bench.load import Arrivals, run
from quire.errors import ConfigError, QuireError

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
        description=__doc__,
        allow_abbrev=False,
    )
    _server_options(found.add_argument_group("server"))
    _prompt_options(found.add_argument_group("prompts"))
    _load_options(found.add_argument_group("load"))
    _result_options(found.add_argument_group("result"))
    group = found.add_argument_group("sampling", "unset: greedy, and the server's defaults")
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind)
    group.add_argument("--logprobs", type=int, metavar="N", help="ask for N log-probabilities")
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields")
    group.add_argument(
        "--ignore-eos", action="store_true", help="answers are exactly as long as asked"
    )
    return found


def _server_options(group: Any) -> None:
    add = group.add_argument
    add("--backend", "--endpoint-type", default="openai", metavar="KIND", help=", ".join(KINDS))
    add("--base-url", metavar="URL", help="instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", metavar="PATH", help="unset: that of the backend")
    add("--model", help="unset: the server's first")
    add("--served-model-name", metavar="NAME", help="what requests call the model")
    add(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME",
        help="adapters, drawn by chance a request",
    )
    add("--header", nargs="*", default=[], metavar="NAME=VALUE", help="more headers")
    add("--api-key", metavar="KEY", help="unset: QUIRE_API_KEY or OPENAI_API_KEY")
    add("--insecure", action="store_true", help="take any certificate")
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=600,
        metavar="S",
        help="wait for it; 0: do not",
    )


def _prompt_options(group: Any) -> None:
    add = group.add_argument
    add("--dataset-name", default="random", metavar="NAME", help=", ".join(datasets.DATASETS))
    add("--dataset-path", type=Path, metavar="FILE")
    add("--num-prompts", type=int, default=1000, metavar="N")
    add("--tokenizer", metavar="NAME", help="unset: the server's, if it lends it")
    add("--trust-remote-code", action="store_true")
    add("--seed", type=int, default=0)
    add("--disable-shuffle", action="store_true", help="keep the order of the file")
    add("--random-input-len", "--input-len", type=int, default=1024, metavar="TOKENS")
    add("--random-output-len", "--output-len", type=int, default=128, metavar="TOKENS")
    add(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths from 1-R to 1+R"
    )
    add(
        "--random-prefix-len",
        type=int,
        default=0,
        metavar="TOKENS",
        help="the same before every prompt",
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
        help="where the file says none",
    )
    add("--sharegpt-output-len", type=int, metavar="TOKENS", help="instead of the file's answers")


def _load_options(group: Any) -> None:
    add = group.add_argument
    add("--request-rate", type=float, default=math.inf, metavar="RPS", help="inf: all at once")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="1: Poisson; less: bursts; more: even",
    )
    add("--max-concurrency", type=int, metavar="N", help="requests at once; the others wait here")
    add("--ramp-up-strategy", choices=("linear", "exponential"))
    add("--ramp-up-start-rps", type=float, default=0.0, metavar="RPS")
    add("--ramp-up-end-rps", type=float, default=0.0, metavar="RPS")
    add(
        "--num-warmups",
        type=int,
        default=0,
        metavar="N",
        help="requests before, which do not count",
    )
    add("--profile", action="store_true", help="/start_profile before and /stop_profile after")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--request-id-prefix", default="bench-", metavar="TEXT", help="of the header X-Request-Id")


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
        help="a request is good within these, such as ttft:200",
    )
    add("--save-result", action="store_true", help="write the figures as JSON")
    add("--save-detailed", action="store_true", help="and those of each request")
    add(
        "--append-result",
        action="store_true",
        help="add to the file, one object a line, instead of replacing it",
    )
    add("--result-dir", type=Path, default=Path(), metavar="FOLDER")
    add("--result-filename", metavar="NAME")
    add("--label", metavar="TEXT", help="begins the file's name; unset: the backend")
    add("--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="into the file as they are")


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def dashed(words: Sequence[str]) -> list[str]:
    """--num_prompts is --num-prompts, as on every command line of ours."""
    return [word if not word.startswith("--") else _dashed(*word.partition("=")) for word in words]


def _dashed(flag: str, equals: str, value: str) -> str:
    return flag.replace("_", "-") + equals + value


def main(argv: Sequence[str]) -> int:
    options = parser()
    given = options.parse_args(dashed(argv))
    try:
        plan = Plan(given)
    except ConfigError as why:
        options.error(str(why))
    try:
        return asyncio.run(plan.run())
    except QuireError as why:
        print(f"quire bench serve: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1


class Plan:
    """One run, from options that make sense."""

    def __init__(self, given: argparse.Namespace):
        """Raises ConfigError: options that do not."""
        self.given = given
        if given.backend not in KINDS:
            raise ConfigError(f"--backend {given.backend}: not one of {', '.join(KINDS)}")
        self.kind: Kind = KINDS[given.backend]
        self.path = given.endpoint or self.kind.path
        self.url = given.base_url or f"http://{_host(given.host)}:{given.port}"
        if self.path.startswith("/v1/"):  # both ways to write an address are in use
            self.url = self.url.rstrip("/").removesuffix("/v1")
        self.told = figures.Told.read(
            given.percentile_metrics, given.metric_percentiles, given.goodput
        )
        self.arrivals = Arrivals(
            given.request_rate, given.burstiness, given.ramp_up_strategy,
            given.ramp_up_start_rps, given.ramp_up_end_rps, given.max_concurrency,
        )  # fmt: skip
        self.arrivals.check()
        self.metadata = _pairs("--metadata", given.metadata)
        self.headers = _pairs("--header", given.header)
        key = given.api_key or env.raw("API_KEY") or env.outer("OPENAI_API_KEY")
        if key:
            self.headers.setdefault("Authorization", f"Bearer {key}")
        self.wanted = _wanted(given)

    async def run(self) -> int:
        given = self.given
        async with Server(self.url, self.headers, given.insecure) as server:
            model = await self._ready(server)
            tokenizer = await datasets.cutter(
                server, model, given.tokenizer, given.trust_remote_code
            )
            prompts = await datasets.make(self.wanted, tokenizer)
            self._announce(model, tokenizer.name)
            if given.num_warmups > 0:
                await self._warm(server, prompts[0], model)
            if given.profile:
                await server.ask("POST", "/start_profile")
            done, seconds = await self._load(server, prompts, model)
            if given.profile:
                await server.ask("POST", "/stop_profile")
        result = figures.figures(done, seconds, self.told)
        print(figures.printout(result, self.told, given.max_concurrency, given.request_rate))
        if wrong := figures.failures(done):
            print(wrong, file=sys.stderr)
        if given.save_result or given.append_result or given.save_detailed:
            self._save(result, done, prompts, model, tokenizer.name)
        return 0 if result["completed"] else 1

    async def _ready(self, server: Server) -> str:
        """Wait until the server answers; the model's name there.

        Raises:
            HttpFailed: it did not in time.
        """
        given = self.given
        name = given.served_model_name or given.model
        end = time.monotonic() + given.ready_check_timeout_sec
        while True:
            try:
                if name and not given.ready_check_timeout_sec:
                    return str(name)
                listed = await server.json("GET", "/v1/models", timeout=30)
                return str(name or listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise HttpFailed(f"{self.url} lists no model: name one with --model") from None
            except HttpFailed as why:
                refused = any(f" {status}:" in str(why) for status in (401, 403))
                if name and " 404:" in str(why):
                    return str(name)  # a server without the list
                if refused or time.monotonic() > end:
                    raise
            await asyncio.sleep(1)

    def _announce(self, model: str, tokenizer: str) -> None:
        given = self.given
        rate = (
            "all at once" if given.request_rate == math.inf else f"{given.request_rate:g} a second"
        )
        print(
            f"{self.wanted.count} prompts ({self.wanted.dataset}) to {self.url}{self.path}, model {model}, {rate},"
            f" burstiness {given.burstiness:g}, at most {given.max_concurrency or 'any number'} at once;"
            f" tokenizer: {tokenizer}",
            flush=True,
        )

    def _body(self, model: str) -> dict[str, Any]:
        given = self.given
        body = {"model": model, "temperature": 0.0}
        body |= {name: value for name in SAMPLING if (value := getattr(given, name)) is not None}
        if given.logprobs is not None:
            chat = given.backend == "openai-chat"
            body |= (
                {"logprobs": True, "top_logprobs": given.logprobs}
                if chat
                else {"logprobs": given.logprobs}
            )
        return body | given.extra_body

    async def _send(self, server: Server, prompt: Prompt, body: dict[str, Any], name: str) -> Done:
        return await ask(
            server, self.kind, self.path, prompt, body,
            ignore_eos=self.given.ignore_eos, clock=time.perf_counter, headers={"X-Request-Id": name},
        )  # fmt: skip

    async def _warm(self, server: Server, prompt: Prompt, model: str) -> None:
        body, prefix = self._body(model), self.given.request_id_prefix

        async def one(number: int) -> Done:
            return await self._send(server, prompt, body, f"{prefix}warm-{number}")

        done, _ = await run(one, self.given.num_warmups, self.arrivals, 0)
        if all(not each.ok for each in done):
            raise HttpFailed(f"the first request failed: {done[0].error}")

    async def _load(
        self, server: Server, prompts: list[Prompt], model: str
    ) -> tuple[list[Done], float]:
        import random

        import tqdm

        given, body = self.given, self._body(model)
        draw = random.Random(given.seed)
        names = [draw.choice(given.lora_modules or [body["model"]]) for _ in prompts]
        with tqdm.tqdm(total=len(prompts), disable=given.disable_tqdm, unit="req") as bar:
            tokens = 0

            def ended(done: Done) -> None:
                nonlocal tokens
                tokens += done.output_tokens
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                bar.update()

            async def one(number: int) -> Done:
                mine = body | {"model": names[number]}
                name = f"{given.request_id_prefix}{number}"
                return await self._send(server, prompts[number], mine, name)

            return await run(one, len(prompts), self.arrivals, given.seed, ended)

    def _save(
        self,
        result: dict[str, Any],
        done: list[Done],
        prompts: list[Prompt],
        model: str,
        tokenizer: str,
    ) -> None:
        given, now = self.given, datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        rate: float | str = given.request_rate if given.request_rate != math.inf else "inf"
        whole: dict[str, Any] = {
            "date": now, "endpoint_type": given.backend, "backend": given.backend, "label": given.label,
            "model_id": model, "tokenizer_id": given.tokenizer or tokenizer, "num_prompts": len(prompts),
            **self.metadata, "request_rate": rate, "burstiness": given.burstiness,
            "max_concurrency": given.max_concurrency,
        }  # fmt: skip
        if given.ramp_up_strategy:
            names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
            whole |= {name: getattr(given, name) for name in names}
        whole |= result
        if given.save_detailed:
            whole |= figures.details(done, [prompt.length for prompt in prompts])
        limit = f"-concurrency{given.max_concurrency}" if given.max_concurrency else ""
        name = given.result_filename or (
            f"{given.label or given.backend}-{rate}qps{limit}-{model.rpartition('/')[2]}-{now}.json"
        )
        path = given.result_dir / name
        try:
            given.result_dir.mkdir(parents=True, exist_ok=True)
            with path.open("a" if given.append_result else "w", encoding="utf-8") as file:
                file.write(json.dumps(whole) + "\n")
        except OSError as why:
            raise QuireError(f"the result could not be written: {why}") from why
        print(f"kept in {path}")


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} {word}: NAME=VALUE")
        found[name] = value
    return found


def _wanted(given: argparse.Namespace) -> datasets.Wanted:
    """The options of the chosen dataset, under one set of names."""
    if given.random_input_len < 1 or given.random_output_len < 1:
        raise ConfigError("--random-input-len and --random-output-len: at least 1")
    if not 0 <= given.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {given.random_range_ratio:g}: from 0 to below 1")
    repeated = given.dataset_name == "prefix_repetition"
    outputs = {
        "prefix_repetition": given.prefix_repetition_output_len,
        "custom": given.custom_output_len,
    }
    return datasets.Wanted(
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
